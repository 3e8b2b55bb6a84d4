"""What users train: a task of theirs, its parts by class path, and their errors as their own."""
