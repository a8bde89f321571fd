"""Predicts what a program costs: memory of each rank, time of a step. Never imports torch."""
