"""DRIFT at a client host: sealed deliveries to owners, evaluation (published), visits with own rows (shielded)."""
