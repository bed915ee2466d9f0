"""The learning systems: mathematics only.  Nothing here reads, writes, logs, encrypts or waits."""
