"""Record steps of a sharded model, and draw them: which unit is full when, what each byte is, and what each stream waits for."""
