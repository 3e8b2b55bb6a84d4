"""The loss of a language model without a tensor of all logits."""
