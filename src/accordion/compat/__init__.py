"""Other libraries' interfaces over Accordion's engine: change one import, and no second runtime comes along."""
