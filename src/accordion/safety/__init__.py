"""What watches a model in training: each file is one net, attached to the engine from outside."""
