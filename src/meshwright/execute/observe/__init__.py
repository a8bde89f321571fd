"""What is measured of a step: clocks, messages, spans."""
