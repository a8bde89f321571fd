"""Evaluates a model: perplexity on held-out text, and the tasks of lm-evaluation-harness."""
