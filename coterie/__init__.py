"""Coterie: a federated recommender system that runs as a real distributed system."""
