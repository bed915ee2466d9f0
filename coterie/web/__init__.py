"""Pages that a command serves to one person's browser: a small guarded server, and the live page for operators."""
