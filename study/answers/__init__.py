"""What every command prints with --json: one object with a schema, a verdict, findings, and the answer's own fields."""
