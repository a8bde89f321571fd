"""The training loop with its optimizer, events, metrics and run folder."""
