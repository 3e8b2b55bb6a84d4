"""Folders that hold checkpoints, on local file systems and on remote storage."""
