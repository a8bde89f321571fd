"""Ranks every legal layout, or rules it out with a reason. Doesn't import torch."""
