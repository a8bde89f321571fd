"""Kernels for the matmuls and the attention of a block, their compilation and recomputation."""
