"""`accordion doctor`: find faults of a machine, and of ranks on it, before a training does."""
