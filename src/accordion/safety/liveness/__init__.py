"""The failure detector: ranks hear over connections of their own which ranks have failed or ended, and where each one is."""
