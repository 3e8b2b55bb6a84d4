"""Other libraries' interfaces over Accordion's engine: change one import, and need no second runtime."""
