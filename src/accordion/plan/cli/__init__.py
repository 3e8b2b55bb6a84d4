"""The command line of `accordion plan`: options, cache, screen and HTML page."""
