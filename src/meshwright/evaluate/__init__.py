"""How good a model is: perplexity on held-out text, and the tasks of lm-evaluation-harness."""
