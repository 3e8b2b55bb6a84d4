"""Replay a log: predict the memory of a step in torch's allocator, and its time on the streams of a GPU."""
