"""References and attacks that several systems are studied with."""
