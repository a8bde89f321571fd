"""The training loop, its optimizers, events, metrics and run folder."""
