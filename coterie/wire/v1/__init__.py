"""Generated from the contract in proto/coterie/v1; see proto/generate.py."""
