"""Process groups, and the transport of messages between ranks."""
