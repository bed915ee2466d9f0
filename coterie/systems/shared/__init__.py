"""What several systems are made of."""
