"""The sums that a COS has seen: written by the COS that lies, read by attacks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

REVEALED = "revealed.jsonl"
"""File in the state folder of a COS that lies: a line for each sum, in the order in which they were formed."""


@dataclass(frozen=True, eq=False)
class Revealed:
    """A sum as the COS sees it.

    Parameters
    ----------
    round, purpose, pass_number, part : int, str, int, int
        As the plan of the sum names them.
    users : int
        Number of users in the sum.
    parties : tuple of str
        Parties whose contributions are in the sum, in the order of the plan's members.
    holders : tuple of str
        Parties that the plan names as key holders; empty unless the sum is encrypted.
    items : tuple of str
        Keys of the catalogue, by index.
    sums : mapping of str to ndarray of float64
        Decoded segments by name.
    """

    round: int
    purpose: str
    pass_number: int
    part: int
    users: int
    parties: tuple[str, ...]
    holders: tuple[str, ...]
    items: tuple[str, ...]
    sums: Mapping[str, NDArray[np.float64]]

    def to_json(self) -> str:
        """Return the sum as one line of JSON."""
        return json.dumps({**vars(self), "sums": {name: each.tolist() for name, each in self.sums.items()}})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the sum that ``to_json`` wrote."""
        told = json.loads(line)
        for name in ("parties", "holders", "items"):
            told[name] = tuple(told[name])
        told["sums"] = {name: np.array(each, np.float64) for name, each in told["sums"].items()}
        return cls(**told)


def append(path: Path, sum_: Revealed) -> None:
    """Append a sum to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(sum_.to_json() + "\n")


def read_revealed(path: Path) -> list[Revealed]:
    """Return the sums in a file, without one that is still being written; none while there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return [Revealed.from_json(line) for line in whole.splitlines()]
