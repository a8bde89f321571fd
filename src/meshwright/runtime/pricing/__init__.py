"""Predictions of runs, and their correction by measurements."""
