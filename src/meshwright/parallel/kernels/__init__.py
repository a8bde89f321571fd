"""Kernels for the products and the attention of a block."""
