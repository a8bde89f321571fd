"""Parallelism for models that users wrote themselves."""
