"""Training libraries on this engine, one module for each. Importing a module imports its library."""
