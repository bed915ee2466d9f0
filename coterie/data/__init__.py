"""Data sets: readers, a generator, splits, and partitions over owners and hosts.

>>> from coterie.data import SyntheticSpec, by_genre, generate, temporal
>>> dataset = generate(SyntheticSpec(users=20, items=30, interactions=200))
>>> split, owners = temporal(dataset), by_genre(dataset)

Downloading is apart, in `coterie.data.fetch`: no service needs it.
"""

from coterie.data.dataset import Dataset, describe
from coterie.data.partition import Partition, by_genre, spread_users
from coterie.data.readers import read
from coterie.data.split import (
    TEST,
    TRAIN,
    VALIDATION,
    Split,
    leave_last_out,
    leave_marked_out,
    random,
    read_split,
    temporal,
)
from coterie.data.synthetic import SyntheticSpec, generate

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
    "Dataset",
    "Partition",
    "Split",
    "SyntheticSpec",
    "by_genre",
    "describe",
    "generate",
    "leave_last_out",
    "leave_marked_out",
    "random",
    "read",
    "read_split",
    "spread_users",
    "temporal",
]
