"""A data owner's identity: its name, keys and items, and the slot that the COS gives it."""

from __future__ import annotations

import csv
from pathlib import Path

from coterie.crypto.identity import Bundle, Identity
from coterie.errors import DataError

__all__ = ["Owner", "read_items"]


def read_items(path: Path) -> list[str]:
    """Read the external keys of an owner's items.

    Raises
    ------
    DataError
        When the file is missing, has no column ``item``, is empty or names an item twice.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if "item" not in (reader.fieldnames or ()):
                raise DataError(
                    f"{path}: the columns are {reader.fieldnames}", hint="a column `item` is expected"
                )
            keys = [row["item"] for row in reader]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not keys or len(set(keys)) != len(keys) or not all(keys):
        raise DataError(f"{path}: no item, an empty key, or an item named twice")
    return keys


class Owner:
    """A data owner of this process, as every system knows it.

    Parameters
    ----------
    name : str
        Its name in the catalogue.
    identity : Identity
        Its private keys.
    bundle : Bundle
        Its public keys, countersigned by the directory.
    items : list of str
        External keys of its items.
    """

    def __init__(self, name: str, identity: Identity, bundle: Bundle, items: list[str]) -> None:
        self.name = name
        self.identity = identity
        self.bundle = bundle
        self.items = items
        self.slot = -1

    @property
    def id(self) -> bytes:
        """Participant id, 32 bytes."""
        return self.identity.participant_id
