"""Learning systems: a package for each, the modules that they share, and the registry that finds them."""
