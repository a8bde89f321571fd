"""Communication of ranks: rendezvous, process groups, messages and their records."""
