"""Declared visibility of DRIFT: which role may see which kind of datum."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.privacy.declarations import (
    MASKED,
    MASKED_ONLY,
    NO_SIDE_INFORMATION,
    NOT_ENCRYPTED,
    ROUNDS_ONLY,
    SHARED,
    WINDOWS_ONLY,
    AccessRow,
    AccessRows,
    anything,
    nobody,
    own,
)

__all__ = ["declared"]

_PUBLISHED: Mapping[str, AccessRow] = {
    **SHARED,
    **NO_SIDE_INFORMATION,
    **dict.fromkeys(WINDOWS_ONLY, nobody("only the shielded form has visits and windows: no RPC carries it")),
    **dict.fromkeys(ROUNDS_ONLY, nobody("the published form has no rounds: no RPC carries it")),
    "interaction": (
        {
            "client": own("the user's own, kept in its host's store (RecordInteraction)"),
            "data-owner": own(
                "sealed by the user for the owner of the item, which opens it (SubmitInteractions)"
            ),
        },
        "records are sealed between user and owner and do not pass through here (SubmitInteractions)",
    ),
    "history": (
        {"client": own("the user's own, kept in its host's store (RecordInteraction)")},
        "an owner gets the records on its own items; only the user has them all (SubmitInteractions)",
    ),
    "sealed_record": (
        {
            "client": own("it seals the records (SubmitInteractions)"),
            "data-owner": own("the records of its own items are sent to it (SubmitInteractions)"),
        },
        "clients send sealed records to owners directly, never through another service (SubmitInteractions)",
    ),
    "record_count": (
        {
            "client": own("it numbers its own records (SubmitInteractions)"),
            "data-owner": own("it acknowledges the last durable number of each user (SubmitInteractions)"),
            "cos": anything("a host reports the sum over its users when its outboxes are empty (Submit)"),
        },
        "no RPC carries it here",
    ),
    "user_metric": (
        {"client": own("each user's metrics are computed at its own host")},
        "a host adds up its users and withholds a sum over fewer than min_users (Submit)",
    ),
    "metric_sum": (
        {
            "client": own("it adds up its own users (Submit)"),
            "cos": anything("one sum a host over at least min_users users, secure_sum = clear (Submit)"),
        },
        "only means over all hosts go further (WatchRun)",
    ),
    "user_factor": (
        {
            "cos": anything("in the published form it keeps Upsilon (DRIFT, section 3; Exchange)"),
            "data-owner": own("it computes on the rows of users in its blocks (Exchange)"),
            "client": own("the rows of its own users, for scoring at the host (Fetch)"),
        },
        "no RPC carries it here",
    ),
    "user_gradient": (
        {
            "cos": anything(
                "the published form sends gradients in clear: a leak, see the attacks (Exchange)"
            ),
            "data-owner": own("it computes it (DRIFT, Alg. 3)"),
        },
        "goes from owner to COS only (Exchange)",
    ),
    "item_gradient": (
        {
            "cos": anything(
                "the published form sends gradients in clear: a leak, see the attacks (Exchange)"
            ),
            "data-owner": own("it computes it (DRIFT, Alg. 3)"),
        },
        "goes from owner to COS only (Exchange)",
    ),
    "requested_rows": (
        {
            "cos": anything("the published form asks for rows by name: a leak, see the attacks (Exchange)"),
            "data-owner": own("it asks for the rows of its own blocks (Exchange)"),
        },
        "goes from owner to COS only (Exchange)",
    ),
    "block_loss": (
        {
            "cos": anything("sent with the gradient, for the progress of the run (Exchange)"),
            "data-owner": own("it computes it (Exchange)"),
        },
        "only its mean goes further (WatchRun)",
    ),
    "block_count": (
        {
            "cos": anything("the durable progress of each owner (Exchange, Submit)"),
            "data-owner": own("its own progress (Exchange, Submit)"),
            "operator": anything("in all, or as the answer to a flush (WatchRun, Flush)"),
        },
        "no RPC carries it here",
    ),
    "recommendation": (
        {
            "cos": anything(
                "it scores by the factors that it keeps, before seen items are filtered (Recommend)"
            ),
            "client": own("its own users' (Recommend)"),
            "operator": anything(
                "in place of the user's application towards a hosted user (UserAgent.Recommend)"
            ),
        },
        "goes to the user only (Recommend)",
    ),
}


_SHIELDED: Mapping[str, AccessRow] = {
    **_PUBLISHED,
    **NOT_ENCRYPTED,
    **dict.fromkeys(
        ("requested_rows", "item_support", "open_items", "private_state", "user_update", "host_update"),
        nobody("the shielded form has nothing of the kind: no RPC carries it"),
    ),
    **dict.fromkeys(("user_items", "host_items"), nobody("nobody is asked for items: no RPC carries it")),
    "user_factor": (
        {
            "client": own("drawn and kept at the user's own host, changed by the owners that it visits"),
            "data-owner": own("sealed for it by the users who visit it (SubmitInteractions, UpdateVector)"),
        },
        "is sealed between user and owner, and the server keeps no Upsilon (SubmitInteractions, UpdateVector)",
    ),
    "user_gradient": (
        {
            "data-owner": own("it computes the step of a user who visits (UpdateVector)"),
            "client": own("its users' own, sealed for them (UpdateVector)"),
        },
        "goes back to the user, sealed (UpdateVector)",
    ),
    "item_gradient": (
        {"data-owner": own("it computes it, and holds it back")},
        "leaves its owner only summed over at least k_min users, in a window (Submit)",
    ),
    "sealed_reply": (
        {
            "data-owner": own("it seals the replies to its visitors (UpdateVector)"),
            "client": own("its users' own (UpdateVector)"),
        },
        "goes from owner to client directly (UpdateVector)",
    ),
    "visit_count": (
        {
            "data-owner": own("its own (Submit)"),
            "cos": anything("from this it knows when a window is due; not who came (Submit)"),
            "operator": anything("in all, in the report (GetReport)"),
        },
        "no RPC carries it here",
    ),
    "block_loss": (
        {
            "data-owner": own("it computes it"),
            "client": own("of its users' own blocks, sealed for them (UpdateVector)"),
        },
        "leaves as a metric inside a sum over users only (Submit)",
    ),
    "block_count": (
        {
            "data-owner": own("its own blocks"),
            "client": own("its users' own, sealed for them (UpdateVector)"),
        },
        "no RPC carries it here",
    ),
    "user_metric": (
        {"client": own("each user's metrics are computed at its own host")},
        "leaves as part of its host's sum only (Submit)",
    ),
    "round_sum": (
        {
            "cos": anything(
                "what a window or an evaluation is for: it steps Psi, and metrics become means (Submit)"
            )
        },
        "goes no further; two versions of the model show what it changed (Fetch)",
    ),
    "cohort": (
        {
            "cos": anything("owners and hosts that are present, and who contributes (Submit)"),
            "data-owner": anything("members check who is in their window before they join (Fetch)"),
            "client": anything("members check who is in their evaluation before they take part (Fetch)"),
        },
        "is told to members only (Fetch)",
    ),
    "recommendation": (
        {
            "client": own("scored at the host, by the model and the user's own row"),
            "operator": anything(
                "in place of the user's application towards a hosted user (UserAgent.Recommend)"
            ),
        },
        "goes to the user only: hosts score by themselves",
    ),
}
"""Rows of the shielded form that do not depend on the secure sum."""


def _shielded(secure_sum: str) -> dict[str, AccessRow]:
    """Return the declared visibility of DRIFT's shielded form under a secure sum."""
    own_window = {"data-owner": own("what it hands over itself (Submit)")}
    added_up = {"client": own("it adds up its own users (Submit)")}
    if secure_sum == "clear":
        return {
            **_SHIELDED,
            **dict.fromkeys(MASKED_ONLY, nobody("a sum in clear has no masks")),
            "window_vector": (
                own_window | {"cos": anything("one vector of each owner that joins a window (Submit)")},
                "goes to the COS only (Submit)",
            ),
            "metric_sum": (
                added_up | {"cos": anything("one sum of each host with at least min_users users (Submit)")},
                "only means over all hosts go further (WatchRun)",
            ),
        }
    masked: dict[str, AccessRow] = {
        kind: ({**by_role, "data-owner": by_role["client"]}, otherwise)
        for kind, (by_role, otherwise) in MASKED.items()
    }
    return {
        **_SHIELDED,
        **masked,
        "window_vector": (own_window, "leaves its owner only under masks (Submit)"),
        "metric_sum": (added_up, "leaves the host only under masks (Submit)"),
    }


def declared(form: str, secure_sum: str) -> AccessRows:
    """Return the declared visibility of a form of DRIFT under a secure sum."""
    return _PUBLISHED if form == "published" else _shielded(secure_sum)
