"""Training libraries on this engine: one module each, which imports its library when it is imported itself, and not before."""
