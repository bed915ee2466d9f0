"""Declared visibility of FedIDCF: that of systems in rounds, and what the Paillier key of its hosts adds."""

from __future__ import annotations

from coterie.privacy.declarations import AccessRow, anything
from coterie.systems.shared.declared_rounds import declared_in_rounds

__all__ = ["declared"]


def declared(form: str, secure_sum: str) -> dict[str, AccessRow]:
    """Return the declared visibility, by kind of datum; parameters as for `declared_in_rounds`."""
    rows = declared_in_rounds(form, secure_sum)
    return {
        **rows,
        "private_state": (
            {
                "client": anything(
                    "its users' own, kept in its store; pseudo meta-latents, means of a few users' vectors, too "
                    "(PseudoMetaLatents)"
                )
            },
            "is part of no contribution; a key user's vector leaves its host only encrypted (RelayLatent)",
        ),
    }
