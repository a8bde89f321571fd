"""The one description of what is held, computed and sent. Never imports torch."""
