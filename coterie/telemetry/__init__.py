"""Telemetry of services (metrics, logs, accounts of CPU time) and the reports of runs."""
