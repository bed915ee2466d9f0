"""References and attacks that the studies of several systems use."""
