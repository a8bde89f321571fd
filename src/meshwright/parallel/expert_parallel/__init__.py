"""Sends tokens to the ranks of their experts."""
