"""How results are shown: tables on the screen, JSON, and HTML files that need nothing beside them."""
