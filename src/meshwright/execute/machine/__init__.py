"""The machine a rank runs on: its processor, its network interfaces and where ranks meet."""
