"""The model shapes that the commands know by name."""
