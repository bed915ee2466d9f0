"""What parties really see: transcripts, the visibility matrix, canaries, and attacks on transcripts."""
