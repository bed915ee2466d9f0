"""Benchmarks: ratios within one run on one machine, printed as a table and written as JSON."""

import os

# One thread for the arithmetic of each process: the threads of a library that wait for
# one another busily would be counted as work.  Before anything imports NumPy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
