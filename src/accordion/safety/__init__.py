"""Checks of a model in training. Each file is one check; most are observers of the engine."""
