"""Data owners: sealed intake, blocks, gradients."""
