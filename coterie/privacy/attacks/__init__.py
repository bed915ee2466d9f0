"""Attacks: what a curious party can infer from the transcript of what it really received."""
