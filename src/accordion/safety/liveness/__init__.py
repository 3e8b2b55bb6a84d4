"""The failure detector: ranks report over their own connections how they fail or end, and what they do."""
