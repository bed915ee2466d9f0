"""The life of a service process: starts it, reports its health, stops it."""
