"""Finds a machine's devices, compilers and links."""
