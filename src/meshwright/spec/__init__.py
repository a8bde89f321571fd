"""The specs: the model, data, training and cluster of a run. Never imports torch."""
