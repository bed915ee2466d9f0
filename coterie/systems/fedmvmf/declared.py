"""Declared visibility of FedMVMF: which role may see which kind of datum."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.privacy.declarations import ENCRYPTED, AccessRow, anything, own
from coterie.systems.shared.declared_rounds import declared_with_sparse

__all__ = ["declared"]

_SIDE: Mapping[str, AccessRow] = {
    "user_attributes": (
        {"client": own("of its own users, from a file that its host was given")},
        "leave the host only inside a contribution, as what a round's sum makes of them",
    ),
    "item_features": (
        {"data-owner": own("of its own items, from a file that it was given")},
        "leave their owner only as the rows that it makes of them (Submit)",
    ),
    "item_pull": (
        {
            "data-owner": own("it computes it from its features and the model (Submit)"),
            "cos": anything("it adds it to the gradient of the item, or ranks a new item by it (Submit)"),
        },
        "goes no further; of new items it is the row that the model has (Fetch)",
    ),
    "item_support": (
        {
            "cos": anything("each group's once, to find the items that are open to it (Submit)"),
            "client": anything(
                "of all groups together, of open items: unrated items are drawn by it (Fetch)"
            ),
            "data-owner": anything(
                "of all groups together, of open items: it tells new items from others (Fetch)"
            ),
        },
        "takes no part in the learning: no RPC carries it here",
    ),
}
"""Rows that differ from other systems in rounds, as FedMVMF has attributes and features."""


def declared(form: str, secure_sum: str) -> dict[str, AccessRow]:
    """Return the declared visibility of FedMVMF: that of systems in rounds, with attributes and features."""
    rows = {**declared_with_sparse(form, secure_sum), **_SIDE}
    if secure_sum == "encrypted":
        by_role, otherwise = rows["item_support"]
        decrypts = {"decrypting-client": ENCRYPTED["item_support"][0]["decrypting-client"]}
        rows["item_support"] = ({**by_role, **decrypts}, otherwise)
    return rows
