"""What is refused or pointed out before a run starts."""
