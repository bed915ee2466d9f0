"""Run benchmarks, which report ratios measured in one run on one machine, as a table and as JSON."""

import os

# One thread for the arithmetic of each process: threads of a library that wait busily for
# # one another would count as work.  Set before anything imports NumPy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
