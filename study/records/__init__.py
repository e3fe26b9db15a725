"""The records that runs write: their schema, how to find them, and how to move them to another machine."""
