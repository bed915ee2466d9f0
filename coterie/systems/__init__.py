"""The learning systems: a room for each, what they share, and the registry that finds them."""
