"""Predict what the step of a log takes: memory in torch's allocator, and time on the streams of a card."""
