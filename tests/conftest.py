"""One thread for each process of the tests.

The models are tiny and many tests run several engines or processes at once; threads that wait for one another
on two cores made such a test fifty times slower. Tests that need more threads ask torch for them.
"""

import os

# Before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
