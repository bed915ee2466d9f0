"""Attacks on transcripts of several systems: inferences that a curious party can draw from what it received."""
