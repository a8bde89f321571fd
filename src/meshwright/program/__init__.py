"""The one description of what every rank holds, computes and sends in a step. Never imports
torch."""
