"""A small table of ratings for tests of the Python interface."""

import numpy as np
import polars as pl

__all__ = ["ratings"]


def ratings(users: int = 60, items: int = 40, rows: int = 1400, seed: int = 1) -> pl.DataFrame:
    """Return ratings in which some items are more popular, with the columns customer, sku, stars and at."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, users, rows), (rng.beta(1, 3, rows) * items).astype(int)
    return pl.DataFrame(
        {
            "customer": [f"u{one}" for one in user],
            "sku": [f"i{one}" for one in item],
            "stars": rng.integers(1, 6, rows),
            "at": rng.permutation(rows),
        }
    )
