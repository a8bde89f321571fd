"""HTML pages of runs, simulations and measured layouts; no torch, no server, no network."""
