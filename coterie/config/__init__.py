"""Configuration: pydantic models for every process and for a run, and the loader that names what is wrong."""
