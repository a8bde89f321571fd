"""Imports configs of other training systems key by key, and writes plans as their configs.

Does not import torch.
"""
