"""Channels and servers over mutual TLS: who is calling, what it may call, how long it took, what was received."""
