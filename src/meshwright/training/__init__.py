"""The training loop and what it needs: optimizer, events, metrics, the run folder."""
