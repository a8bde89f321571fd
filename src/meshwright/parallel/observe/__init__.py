"""Measures a step: clocks, messages, spans."""
