"""The ``coterie`` command: a module for each command, which imports what is heavy only when it runs."""
