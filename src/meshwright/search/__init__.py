"""Which layout is best: every legal one considered, priced or ruled out with a reason. No torch."""
