"""DRIFT."""
