"""Gathers weights, sums gradients and divides updates among copies of the model."""
