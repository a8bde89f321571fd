"""Faults put into the code that trains, one at a time: each must be caught (`make mutants`)."""
