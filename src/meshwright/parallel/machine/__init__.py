"""The machine of a rank: its processor, its network interfaces and the rendezvous."""
