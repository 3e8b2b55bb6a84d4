"""The command line of `accordion plan`: options and screen."""
