"""A table per sublayer: its parameters, operations, saved bytes, workspaces and FLOPs. No torch."""
