"""Saves and loads checkpoints: a step is either complete and verified, or absent."""
