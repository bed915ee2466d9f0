"""Data sets: readers, a generator, splits, and partitions over owners and hosts.

>>> from coterie.data import SyntheticSpec, by_genre, generate, temporal
>>> dataset = generate(SyntheticSpec(users=20, items=30, interactions=200))
>>> split, owners = temporal(dataset), by_genre(dataset)

Downloading is apart, in `coterie.data.fetch`: no service needs it.  A module is loaded when one of its names is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_WHERE = {
    "attributes": (
        "AttributeTable",
        "item_attributes",
    ),
    "dataset": (
        "Dataset",
        "describe",
    ),
    "demographics": ("read_user_attributes",),
    "filters": ("Filter",),
    "partition": (
        "Partition",
        "by_genre",
        "spread_users",
    ),
    "readers": (
        "read",
        "read_frame",
    ),
    "split": (
        "Split",
        "TEST",
        "TRAIN",
        "VALIDATION",
        "cold_items",
        "cold_users",
        "hold_marked_out",
        "leave_last_out",
        "leave_marked_out",
        "leave_random_out",
        "random",
        "read_split",
        "temporal",
    ),
    "synthetic": (
        "SyntheticSpec",
        "generate",
        "generate_user_attributes",
    ),
}
"""Names of this package by the module that has them."""


def __getattr__(name: str) -> Any:
    """Return a name of this package, from the module that has it (PEP 562)."""
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names."""
    return sorted({*globals(), *__all__})
