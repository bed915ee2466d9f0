"""Attacks: inferences that a curious party can draw from the transcript of what it received."""
