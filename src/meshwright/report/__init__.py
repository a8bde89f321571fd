"""Pages that show what was planned, simulated and measured; no torch, no server, no network."""
