"""DRIFT at the orchestration server: runs of both forms, the model, calls of the published form, checks of plans."""
