"""Where checkpoints are kept: local disks and remote storage."""
