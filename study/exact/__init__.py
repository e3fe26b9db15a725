"""Train with exact arithmetic: no addition rounds, so that every engine must end with the same bits."""
