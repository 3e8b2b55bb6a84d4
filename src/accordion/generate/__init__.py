"""`accordion generate`: writes text with a model from a checkpoint, a run or a folder of transformers."""
