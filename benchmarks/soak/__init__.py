"""Many proofs on two ranks under checks of the heap, to find crashes that come once in a while."""
