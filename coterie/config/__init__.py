"""Configuration: pydantic models of every service and of a run, and the loader that explains every error."""
