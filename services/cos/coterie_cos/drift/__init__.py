"""Run DRIFT at the COS: runs of both forms, the model and calls of the published form, checks of plans."""
