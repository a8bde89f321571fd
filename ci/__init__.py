"""What CI runs, as a table of parts. In the standard library alone: it sets up all else."""
