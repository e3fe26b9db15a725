"""Define the output of --json: one object with a schema, a verdict, findings, and the fields of the command."""
