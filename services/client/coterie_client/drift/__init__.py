"""Run DRIFT at a client host: deliveries to owners and evaluation (published), visits with users' rows (shielded)."""
