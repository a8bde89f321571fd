"""Proves that a layout computes what one device does, and what its program says."""
