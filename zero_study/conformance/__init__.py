"""Check whether the installed engines train correctly, by comparing trainings with a reference without engines."""
