"""Show results as tables on the screen, as JSON, and as self-contained HTML files."""
