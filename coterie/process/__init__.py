"""One service process: start, health, stop."""
