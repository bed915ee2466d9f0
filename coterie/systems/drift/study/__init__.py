"""References and tables of DRIFT."""
