"""Declared visibility of FedGNN: that of systems in rounds, and what users with neighbours share."""

from __future__ import annotations

from coterie.privacy.declarations import AccessRow, anything
from coterie.systems.shared.declared_rounds import declared_in_rounds

__all__ = ["declared"]


def declared(form: str, secure_sum: str) -> dict[str, AccessRow]:
    """Return the declared visibility, by kind of datum; parameters as for `declared_in_rounds`."""
    rows = declared_in_rounds(form, secure_sum)
    learned, _ = rows["item_support"]
    return {
        **rows,
        "item_support": (
            learned,
            "only the list of open items goes further and, where users have neighbours, coarse levels of how many "
            "publish an item under tags (Fetch)",
        ),
        "private_state": (
            {
                "client": anything(
                    "its users' own, kept in its store; with neighbours also their embeddings, without names "
                    "(Neighbours)"
                )
            },
            "is part of no contribution; an embedding leaves its host only sealed, to hosts of neighbours (Relay)",
        ),
    }
