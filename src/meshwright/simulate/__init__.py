"""Rehearses the real program on fake ranks: no messages, no memory, any world size, one core."""
