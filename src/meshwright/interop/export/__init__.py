"""A plan as the config file of another trainer. Never imports torch."""
