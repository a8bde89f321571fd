"""The specs: what is trained, on what data, how and where. Never imports torch."""
