"""Which published claims hold? Each with how it is decided, what was observed, and a verdict that can be made again."""
