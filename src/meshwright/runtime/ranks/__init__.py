"""One rank of a run, and the ranks of this machine."""
