"""Define the output of --json: one object with a schema, a verdict, findings, and the keys of the command."""
