"""Metrics, logs, accounts of work, and the reports made from them."""
