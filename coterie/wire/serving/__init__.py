"""Generated from the contract in proto/coterie/serving/v1; see proto/generate.py."""
