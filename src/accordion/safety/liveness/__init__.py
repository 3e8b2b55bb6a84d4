"""The failure detector: ranks report over TCP connections of this package how they fail or end, and what they do."""
