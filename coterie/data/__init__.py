"""Data sets: readers, a generator, splits, and partitions over owners and hosts.

>>> from coterie.data import SyntheticSpec, by_genre, generate, temporal
>>> dataset = generate(SyntheticSpec(users=20, items=30, interactions=200))
>>> split, owners = temporal(dataset), by_genre(dataset)

Downloading is apart, in `coterie.data.fetch`: no service needs it.
"""

from coterie.data.attributes import AttributeTable, item_attributes
from coterie.data.dataset import Dataset, describe
from coterie.data.demographics import read_user_attributes
from coterie.data.filters import Filter
from coterie.data.partition import Partition, by_genre, spread_users
from coterie.data.readers import read, read_frame
from coterie.data.split import (
    TEST,
    TRAIN,
    VALIDATION,
    Split,
    cold_items,
    cold_users,
    hold_marked_out,
    leave_last_out,
    leave_marked_out,
    leave_random_out,
    random,
    read_split,
    temporal,
)
from coterie.data.synthetic import SyntheticSpec, generate, generate_user_attributes

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
    "AttributeTable",
    "Dataset",
    "Filter",
    "Partition",
    "Split",
    "SyntheticSpec",
    "by_genre",
    "cold_items",
    "cold_users",
    "describe",
    "generate",
    "generate_user_attributes",
    "hold_marked_out",
    "item_attributes",
    "leave_last_out",
    "leave_marked_out",
    "leave_random_out",
    "random",
    "read",
    "read_frame",
    "read_split",
    "read_user_attributes",
    "spread_users",
    "temporal",
]
