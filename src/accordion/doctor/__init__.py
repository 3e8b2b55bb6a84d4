"""`accordion doctor`: what is wrong with a machine, and with ranks on it, before a training finds out."""
