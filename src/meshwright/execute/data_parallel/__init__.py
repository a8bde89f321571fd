"""Weights gathered, gradients summed and updates shared between copies of the model."""
