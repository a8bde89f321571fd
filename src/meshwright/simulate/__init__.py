"""The real program rehearsed on fake ranks: no messages, no memory, any world size, one core."""
