"""Measurements: what the device and the links at hand do, and layouts side by side."""
