"""The flight recorder: a rank's current activity, readable from outside."""
