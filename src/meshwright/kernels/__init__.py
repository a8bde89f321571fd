"""Kernels for the matmuls and the attention of a block, and their compilation."""
