"""Measurements of what parties learn: transcripts, the visibility matrix, canaries, and attacks on transcripts."""
