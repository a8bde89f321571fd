"""Process groups and what carries messages between ranks."""
