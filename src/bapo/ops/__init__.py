"""Tensor operations that know nothing of training: masked reductions and token log-probabilities."""
