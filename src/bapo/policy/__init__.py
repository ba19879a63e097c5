"""Load a causal language model, score tokens with it, hand out its weights."""
