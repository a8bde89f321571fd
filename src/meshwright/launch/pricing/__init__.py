"""What was predicted, and what is measured of it."""
