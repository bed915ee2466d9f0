"""Run the central orchestration server (COS), which keeps registry, catalogue and model of each run."""
