"""Modules that several learning systems use."""
