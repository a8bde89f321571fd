"""The flight recorder: what a rank is doing, readable from outside."""
