"""Runs the program: process groups and the parallel model, on torch's distributed engine."""
