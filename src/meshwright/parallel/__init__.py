"""Builds and runs this rank's part of the model, on torch's distributed engine."""
