"""What a machine has: devices, compilers, links."""
