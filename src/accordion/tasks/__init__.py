"""Tasks of users: load them by class path, read their options, and show errors of their code."""
