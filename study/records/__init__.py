"""The records that runs leave: their schema, how to find them, and how to move them to another machine."""
