"""The main job: one command that trains a sharded model on text."""
