"""The ``coterie`` command line, with one module for each command; modules import heavy packages only when they run."""
