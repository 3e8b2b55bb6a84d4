"""One training step of one rank as a log of events, from fake tensors."""
