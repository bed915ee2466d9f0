"""A COS that lies to the parties of a real federation: what it tells whom, and what it learns by that."""
