"""DRIFT at data owners: intake of sealed records, training (published), held rows and windows (shielded)."""
