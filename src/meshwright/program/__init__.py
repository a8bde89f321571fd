"""The one description of what ranks hold, compute and send. Never imports torch."""
