"""Declared visibility of EASE: which role may see which kind of datum."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.privacy.declarations import ENCRYPTED, AccessRow, anything, nobody
from coterie.systems.shared.declared_rounds import declared_in_rounds

__all__ = ["declared"]

_OWN: Mapping[str, AccessRow] = {
    "round_sum": (
        {
            "cos": anything(
                "exact counts, unless users add noise: how many users have each pair of open items; a count of 1 is "
                "one user's pair, and the pairs of an item with few users are their histories; of a sketch, products "
                "of these counts with columns that everybody knows (Submit)"
            )
        },
        "only the model that it makes goes further, from which counts of at least min_pairs can be computed (Fetch)",
    ),
    "item_support": (
        {"cos": anything("of the whole population once, exact unless users add noise (Submit)")},
        "only the list of open items goes further, and their coarse levels where popularity has a weight (Fetch)",
    ),
    "private_state": nobody(
        "the seed of a user's noise, where it adds any: whoever has it can take the noise away"
    ),
}
"""Rows that differ from other systems in rounds."""


def declared(form: str, secure_sum: str) -> dict[str, AccessRow]:
    """Return the declared visibility of EASE: that of systems in rounds, with a sum of counts."""
    rows = {**declared_in_rounds(form, secure_sum), **_OWN}
    if secure_sum == "encrypted":
        for name in ("round_sum", "item_support"):
            by_role, otherwise = rows[name]
            decrypts = {
                role: access
                for role, access in ENCRYPTED.get(name, ({}, ""))[0].items()
                if role == "decrypting-client"
            }
            rows[name] = ({**by_role, **decrypts}, otherwise)
    return rows
