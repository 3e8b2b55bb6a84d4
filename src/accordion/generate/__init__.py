"""`accordion generate`: text from a checkpoint, a run or a folder of transformers."""
