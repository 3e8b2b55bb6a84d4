"""Show results as tables on the screen and as JSON."""
