"""The engine that gathers parameters and reduces gradients in a step. README.md has the order in which to read its files."""
