"""Studies of systems by runs: whole runs with their reports, divided data, reference rows, attacks, replays, tables."""
