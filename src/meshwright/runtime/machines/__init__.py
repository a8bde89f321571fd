"""Detects a machine's devices, compilers and links."""
