"""Pages of plans, simulations and measurements; no torch, no server, no network."""
