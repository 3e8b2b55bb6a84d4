"""The command line of `accordion.plan`: what it reads, shows and writes."""
