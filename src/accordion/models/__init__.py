"""Models for the commands: presets, models of transformers on the meta device, and stored models."""
