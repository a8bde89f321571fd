"""Layers sharded over tp, and the messages at the borders of their regions."""
