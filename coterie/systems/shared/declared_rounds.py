"""Declared visibility of systems in rounds: which role may see which kind of datum."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.privacy.declarations import (
    DENOISED,
    ENCRYPTED,
    MASKED,
    MASKED_ONLY,
    NO_DENOISERS,
    NO_SIDE_INFORMATION,
    NOT_ENCRYPTED,
    NOT_SHARED,
    OWNERS_LEARN_ONLY,
    RUN_PARTIES,
    SHARED,
    SHARED_KEY,
    SPARSE,
    WHOLE,
    WINDOWS_ONLY,
    AccessRow,
    anything,
    everybody,
    nobody,
    own,
)

__all__ = ["declared_in_rounds", "declared_with_sparse"]

_ROUNDS: Mapping[str, AccessRow] = {
    **SHARED,
    **NO_SIDE_INFORMATION,
    **NOT_SHARED,
    **NO_DENOISERS,
    **WHOLE,
    **dict.fromkeys(
        (*OWNERS_LEARN_ONLY, *WINDOWS_ONLY), nobody("owners learn nothing from users here: no RPC carries it")
    ),
    "interaction": (
        {"client": own("the user's own, kept in its host's store (RecordInteraction)")},
        "interactions never leave the host of their user: it trains where they are",
    ),
    "history": (
        {"client": own("the user's own, kept in its host's store (RecordInteraction)")},
        "a history never leaves the host of its user; what a contribution tells of it is a kind of its own",
    ),
    "private_state": (
        {"client": own("its users' own, kept in its store; used by the next round and for recommendations")},
        "is part of no contribution and of no other message",
    ),
    "round_sum": (
        {"cos": anything("what a round is for: it changes the model, and metrics become means (Submit)")},
        "goes no further; two versions of the model show what it changed (Fetch)",
    ),
    "item_support": (
        {"cos": anything("each group's once, to find the items that are open to it; touch = once (Submit)")},
        "only the list of open items goes further, and their coarse levels where popularity has a weight (Fetch)",
    ),
    "open_items": everybody(
        "which items a group may train (Fetch)", RUN_PARTIES, otherwise="takes no part in runs"
    ),
    "cohort": (
        {
            "cos": anything("it draws the cohorts, and hears who contributes (Submit)"),
            "client": anything("members check who is in their sum before they take part (Fetch)"),
        },
        "is told to hosts of users only (Fetch)",
    ),
    "recommendation": (
        {
            "client": own("scored at the host, by the model and the user's own embedding"),
            "operator": anything(
                "in place of the user's application towards a hosted user (UserAgent.Recommend)"
            ),
        },
        "goes to the user only: hosts score by themselves",
    ),
}
"""Rows that depend neither on the form of the run nor on its secure sum."""

_IN_CLEAR = ("clear", "denoised")
"""Sums whose contributions the server sees."""

_OF_ONE_USER = ("user_update", "user_metric", "user_items")
_OF_A_HOST = ("host_update", "metric_sum", "host_items")


def declared_in_rounds(form: str, secure_sum: str) -> dict[str, AccessRow]:
    """Return the declared visibility of a system in rounds whose hosts send nothing but contributions.

    Parameters
    ----------
    form : {"hosts", "users"}
        Whether a host is one member of a sum for all its users in the cohort, or every user is a member.
    secure_sum : {"clear", "denoised", "masked", "encrypted", "shared-key"}
    """
    at_host = {"client": own("computed at the user's own host")}
    added_up = {"client": own("it adds up its own users")}
    clear, hosts = secure_sum in _IN_CLEAR, form == "hosts"
    hidden = {"masked": "under masks", "encrypted": "encrypted", "shared-key": "encrypted"}.get(
        secure_sum, ""
    )
    if not clear:
        one = (at_host, f"leaves its host only {hidden}, as part of a sum (Submit)")
    elif hosts:
        alone = own(
            "of a user who is the only one of its host in the cohort: the host's sum is its own (Submit)"
        )
        one = (at_host | {"cos": alone}, "goes to the COS only, as part of its host's sum (Submit)")
    else:
        each = anything("each user is a member of its own: a leak, secure_sum = masked stops it (Submit)")
        one = (at_host | {"cos": each}, "goes to the COS only (Submit)")
    if not hosts:
        several = nobody("every user is a member of its own: no host adds up its users")
    elif clear:
        several = (
            added_up | {"cos": anything("one sum of each host in the cohort (Submit)")},
            "goes to the COS only (Submit)",
        )
    else:
        several = (added_up, f"leaves the host only {hidden} (Submit)")
    no_masks = dict.fromkeys(
        MASKED_ONLY, nobody(f"a sum {secure_sum if not clear else 'in clear'} has no masks")
    )
    return {
        **_ROUNDS,
        **dict.fromkeys(_OF_ONE_USER, one),
        **dict.fromkeys(_OF_A_HOST, several),
        **{
            "clear": {**no_masks, **NOT_ENCRYPTED},
            "denoised": {**no_masks, **NOT_ENCRYPTED, **DENOISED},
            "masked": {**MASKED, **NOT_ENCRYPTED},
            "encrypted": {**no_masks, **ENCRYPTED},
            "shared-key": {**no_masks, **SHARED_KEY},
        }[secure_sum],
    }


def declared_with_sparse(form: str, secure_sum: str) -> dict[str, AccessRow]:
    """Return the rows of `declared_in_rounds` for a system whose contributions may leave out zeros."""
    return {**declared_in_rounds(form, secure_sum), **SPARSE.get(secure_sum, {})}
