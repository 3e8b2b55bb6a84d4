"""Which configuration to take, of all that fit."""
