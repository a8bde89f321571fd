"""Compares the steps of any trainer, on many ranks, with one process."""
