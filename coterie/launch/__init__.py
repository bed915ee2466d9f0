"""Processes: the life of one service, and a whole federation on one machine."""
