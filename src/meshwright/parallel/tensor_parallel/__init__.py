"""Layers sharded over tp, and the collectives at the borders of their regions."""
