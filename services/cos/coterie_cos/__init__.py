"""The central orchestration server (COS): registry, catalogue, model, runs."""
