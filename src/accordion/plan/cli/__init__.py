"""The command line of `accordion plan`: options, cache and screen."""
