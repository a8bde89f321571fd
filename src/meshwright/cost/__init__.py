"""Predicts the memory of each rank and the time of a step for a program. Never imports torch."""
