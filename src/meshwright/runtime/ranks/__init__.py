"""The process of one rank of a run, and the ranks of this machine."""
