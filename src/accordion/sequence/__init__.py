"""Sequence parallelism: each rank of a group has a part of every sequence, and attention exchanges parts for heads."""
