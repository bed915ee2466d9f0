"""What is done with runs: their data, references, replays, attacks, tables."""
