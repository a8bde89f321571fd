"""Local ranks that prove."""
