"""Layers cut over tp, and what is sent where their regions begin and end."""
