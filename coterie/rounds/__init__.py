"""State machines of runs and rounds, without I/O: services give them events and carry out their effects."""
