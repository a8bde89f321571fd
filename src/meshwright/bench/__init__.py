"""Measures this machine's devices and links, and layouts side by side."""
