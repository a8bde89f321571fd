"""What a program costs before it runs: memory of each rank, time of a step. Never imports torch."""
