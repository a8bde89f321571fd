"""Measures this machine's devices and links, and compares layouts by running them."""
