"""Studies of systems by runs: division of data, runs in one process, reference rows, replays, tables, reports."""
