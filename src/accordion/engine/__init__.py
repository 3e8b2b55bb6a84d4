"""The sharding engine. README.md has the order in which to read its files."""
