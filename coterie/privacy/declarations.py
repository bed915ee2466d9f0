"""What kinds of datum there are, and which role may see which, for each system, form and secure sum.

A table for people is made from this in docs/threat-model.md, and compared with it by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coterie.privacy.fields import UNCLASSIFIED

__all__ = ["DECLARED", "KINDS", "ROLES", "Access"]

ROLES = ("cos", "data-owner", "client", "decrypting-client", "thirdparty", "operator")
"""Roles of parties, as in certificates."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "interaction": "a user's item with its flag, in clear",
        "history": "a user's interactions at all owners together",
        "user_name": "a user's name on its host",
        "sealed_record": "interactions sealed for one owner; in DRIFT's shielded form with the user's row",
        "sealed_reply": "what a user's visit to an owner made of the user's row, sealed for the user",
        "record_count": "how many records a user, or a host's users together, sent",
        "user_metric": "a metric of a single user",
        "metric_sum": "a metric summed over users of a host; in DRIFT over at least min_users",
        "metric_mean": "a metric, or the training loss, averaged over everybody who reported",
        "user_factor": "a row of Upsilon; in DRIFT's shielded form it is the user's own",
        "item_factor": "the model that everybody shares: a row of Psi or of item embeddings, a network's weights",
        "user_attributes": "what is known of a user beside its interactions: age band, occupation and the like",
        "item_features": "what a data owner knows of its items beside who rated them",
        "item_pull": "what a data owner makes of its items' features for a round: a row of values for each item",
        "private_state": "what stays with a user from round to round: its own embedding, its optimiser's moments",
        "user_gradient": "the gradient of a user's row over an owner's blocks",
        "item_gradient": "the gradient of an item's row over an owner's blocks",
        "requested_rows": "users and items named together in one exchange",
        "window_vector": "an owner's gradients in a window: of rows with at least k_min users behind them, in clear",
        "visit_count": "how many visits an owner has taken, and how many rows it holds back",
        "block_loss": "the loss of an owner's blocks",
        "block_count": "how many blocks an owner has applied, of how many interactions",
        "user_update": "what one user's training changes in the model, with its counts, in clear",
        "host_update": "the same, summed over those users of a host who are in the cohort",
        "user_items": "which items one user has, without more, in clear",
        "host_items": "how many of a host's users in a group have each item",
        "masked_vector": "a contribution under masks",
        "encrypted_vector": "a contribution under the key of an encrypted sum",
        "encrypted_sum": "a sum of contributions under that key, or a part of it",
        "sent_places": "which parts of a sparse contribution were sent: near which items there is something",
        "sealed_model": "a version of the model, sealed for the participants, which share the key",
        "cohort_metric": "metrics summed over a cohort, as those tell them who opened its sum",
        "round_key": "a member's public keys, commitments and signatures of one round",
        "sealed_share": "shares of a member's secrets of one round, sealed for one neighbour",
        "revealed_share": "a share of one of a member's two secrets of a round",
        "round_sum": "the sum over all who contributed to a round, with its counts and metrics",
        "item_support": "how many users of a group have each item",
        "open_items": "which items a group may train",
        "cohort": "who is in a group, in a round, at which host, and who contributed",
        "recommendation": "the items recommended to a user, their scores, how many were asked for",
        "disclosure": "the receipt of what has left a user's device",
        "item_key": "the external key of an item",
        "holding": "which owner holds which items",
        "participant_id": "the pseudonym of a participant, SHA-256 of its public key",
        "slot": "the number of a participant within a run",
        "public_key": "key bundles, certificates, prekeys and the signatures on them",
        "secret_key": "a private key",  # pragma: allowlist secret
        "sealed_key": "a Paillier key's secret, sealed for one of its holders",
        "enrolment_token": "a one-time token for enrolment",
        "delegation": "a participant's statement that a connection speaks for it",
        "endpoint": "logical name, role and address of a service",
        "plan": "what a run learns and how",
        "latency": "how long messages between two services take, and how much their connection carries",
        "run_state": "phase, epoch, version and counters of a run",
        "protocol": "sequence numbers, cursors, hashes, deadlines",
        UNCLASSIFIED: "a field of a message that has no kind yet",
    }
)
"""Every kind of datum, in words."""


@dataclass(frozen=True)
class Access:
    """Whether a role may see a kind of datum.

    Attributes
    ----------
    allowed : bool
        Whether it may.
    why : str
        Why, or why not, in one line; the RPC that carries it in parentheses.
    own_only : bool
        Whether it may see only what is its own (its users' or items', not another party's of the same role) or only
        what ``why`` names.
    """

    allowed: bool
    why: str
    own_only: bool = False


def _any(why: str) -> Access:
    return Access(True, why)


def _own(why: str) -> Access:
    return Access(True, why, own_only=True)


_Row = tuple[Mapping[str, Access], str]
"""Who may see a kind, by role; and why nobody else may."""


def _everybody(why: str, roles: Iterable[str] = ROLES, *, otherwise: str = "") -> _Row:
    return {role: _any(why) for role in roles}, otherwise


def _nobody(why: str) -> _Row:
    return {}, why


_RUN_PARTIES = ("cos", "data-owner", "client")
_REGISTERED = (*_RUN_PARTIES, "decrypting-client")

_SHARED: Mapping[str, _Row] = {
    "user_name": (
        {"client": _own("the user's application names the user to its host (UserAgent)")},
        "a user is a key's SHA-256 beyond its host; no message of any other service has a name (Participant)",
    ),
    "metric_mean": _everybody(
        "a mean over all hosts or owners that reported (WatchRun)",
        ("cos", "operator"),
        otherwise="no RPC carries it here",
    ),
    "item_factor": _everybody(
        "the shared model (Fetch; in DRIFT also Exchange)",
        _RUN_PARTIES,
        otherwise="takes no part in the learning: no RPC carries it here",
    ),
    "disclosure": (
        {
            "client": _own("written from its own send log (DisclosureReceipt)"),
            "operator": _any("in place of the user's application towards a hosted user (DisclosureReceipt)"),
        },
        "goes to the user only (DisclosureReceipt)",
    ),
    "item_key": _everybody(
        "public by design: the catalogue, and the lists made from it (Register, Fetch)",
        (*_RUN_PARTIES, "operator"),
        otherwise="keeps keys of participants, not of items: no RPC carries it here",
    ),
    "holding": _everybody(
        "public by design: clients look up an item's owners in the catalogue (Fetch)",
        _RUN_PARTIES,
        otherwise="no RPC carries it here",
    ),
    "participant_id": _everybody("a pseudonym that says nothing but which key it is (Lookup, Fetch)"),
    "slot": _everybody(
        "numbers participants within a run (Register, Fetch)",
        _REGISTERED,
        otherwise="takes no part in runs: no RPC carries it here",
    ),
    "public_key": _everybody("public (Enrol, Lookup)"),
    "secret_key": (
        {role: _own("its own, or its participants', in files of mode 0600") for role in ROLES},
        "no private key leaves the party that made it, but a Paillier key, sealed for its holders (sealed_key)",
    ),
    "sealed_key": (
        {
            "client": _own(
                "its participants', or those that it sealed (PaillierEnvelope, PublishPaillierKey)"
            ),
            "decrypting-client": _own(
                "its own, or those that it sealed (PaillierEnvelope, PublishPaillierKey)"
            ),
            "thirdparty": _any("it relays what only holders can open (PublishPaillierKey)"),
        },
        "goes through the third party to holders only (PaillierEnvelope)",
    ),
    "enrolment_token": (
        {
            "thirdparty": _any("it exchanges tokens for certificates (Enrol)"),
            "operator": _any("it hands tokens out"),
            **{role: _own("its own, used once (Enrol)") for role in _REGISTERED},
        },
        "",
    ),
    "delegation": (
        {
            "cos": _any("it checks who speaks for a participant (Register)"),
            "client": _own("its participants sign it (Register)"),
            "data-owner": _own("its participants sign it (Register)"),
            "decrypting-client": _own("it signs its own (Register)"),
        },
        "no RPC carries it here",
    ),
    "endpoint": _everybody("how services find and verify each other (Register, Fetch, Enrol)"),
    "plan": _everybody(
        "everybody in a run can verify its plan (Register, StartRun)",
        (*_REGISTERED, "operator"),
        otherwise="takes no part in runs: no RPC carries it here",
    ),
    "latency": (
        {
            "cos": _any("its own, and what parties bring for the operator (Attend)"),
            "data-owner": _own("it measures to those that it calls (Attend)"),
            "client": _own("it measures to those that it calls (Attend)"),
            "decrypting-client": _own("it measures to those that it calls (Attend)"),
            "operator": _any("it has services measure (Measure)"),
        },
        "calls nobody, and no RPC carries it here",
    ),
    "run_state": _everybody(
        "counters over everybody (WatchRun)", ("cos", "operator"), otherwise="no RPC carries it here"
    ),
    "protocol": _everybody("the protocol's own numbers"),
    UNCLASSIFIED: ({}, "give the field a kind in coterie/privacy/fields.py"),
}
"""Rows that are the same whatever is learned."""

_ROUNDS_ONLY = (
    "private_state",
    "user_update",
    "host_update",
    "user_items",
    "host_items",
    "masked_vector",
    "encrypted_vector",
    "encrypted_sum",
    "sent_places",
    "sealed_model",
    "cohort_metric",
    "round_key",
    "sealed_share",
    "revealed_share",
    "round_sum",
    "item_support",
    "open_items",
    "cohort",
)

_SHIELDED_ONLY = ("sealed_reply", "window_vector", "visit_count")

_SIDE_INFORMATION = ("user_attributes", "item_features", "item_pull")

_NO_SIDE_INFORMATION: Mapping[str, _Row] = dict.fromkeys(
    _SIDE_INFORMATION, _nobody("the system has no use for attributes and features: nobody is given any")
)

_DRIFT_PUBLISHED: Mapping[str, _Row] = {
    **_SHARED,
    **_NO_SIDE_INFORMATION,
    **dict.fromkeys(
        _SHIELDED_ONLY, _nobody("only the shielded form has visits and windows: no RPC carries it")
    ),
    **dict.fromkeys(_ROUNDS_ONLY, _nobody("the published form has no rounds: no RPC carries it")),
    "interaction": (
        {
            "client": _own("the user's own, kept in its host's store (RecordInteraction)"),
            "data-owner": _own(
                "sealed by the user for the owner of the item, which opens it (SubmitInteractions)"
            ),
        },
        "records are sealed between user and owner and do not pass through here (SubmitInteractions)",
    ),
    "history": (
        {"client": _own("the user's own, kept in its host's store (RecordInteraction)")},
        "an owner gets the records on its own items; only the user has them all (SubmitInteractions)",
    ),
    "sealed_record": (
        {
            "client": _own("it seals the records (SubmitInteractions)"),
            "data-owner": _own("the records of its own items are sent to it (SubmitInteractions)"),
        },
        "clients send sealed records to owners directly, never through another service (SubmitInteractions)",
    ),
    "record_count": (
        {
            "client": _own("it numbers its own records (SubmitInteractions)"),
            "data-owner": _own("it acknowledges the last durable number of each user (SubmitInteractions)"),
            "cos": _any("a host reports the sum over its users when its outboxes are empty (Submit)"),
        },
        "no RPC carries it here",
    ),
    "user_metric": (
        {"client": _own("each user's metrics are computed at its own host")},
        "a host adds up its users and withholds a sum over fewer than min_users (Submit)",
    ),
    "metric_sum": (
        {
            "client": _own("it adds up its own users (Submit)"),
            "cos": _any("one sum a host over at least min_users users, secure_sum = clear (Submit)"),
        },
        "only means over all hosts go further (WatchRun)",
    ),
    "user_factor": (
        {
            "cos": _any("in the published form it keeps Upsilon (DRIFT, section 3; Exchange)"),
            "data-owner": _own("it computes on the rows of users in its blocks (Exchange)"),
            "client": _own("the rows of its own users, for scoring at the host (Fetch)"),
        },
        "no RPC carries it here",
    ),
    "user_gradient": (
        {
            "cos": _any("the published form sends gradients in clear: a leak, see the attacks (Exchange)"),
            "data-owner": _own("it computes it (DRIFT, Alg. 3)"),
        },
        "goes from owner to COS only (Exchange)",
    ),
    "item_gradient": (
        {
            "cos": _any("the published form sends gradients in clear: a leak, see the attacks (Exchange)"),
            "data-owner": _own("it computes it (DRIFT, Alg. 3)"),
        },
        "goes from owner to COS only (Exchange)",
    ),
    "requested_rows": (
        {
            "cos": _any("the published form asks for rows by name: a leak, see the attacks (Exchange)"),
            "data-owner": _own("it asks for the rows of its own blocks (Exchange)"),
        },
        "goes from owner to COS only (Exchange)",
    ),
    "block_loss": (
        {
            "cos": _any("sent with the gradient, for the progress of the run (Exchange)"),
            "data-owner": _own("it computes it (Exchange)"),
        },
        "only its mean goes further (WatchRun)",
    ),
    "block_count": (
        {
            "cos": _any("the durable progress of each owner (Exchange, Submit)"),
            "data-owner": _own("its own progress (Exchange, Submit)"),
            "operator": _any("in all, or as the answer to a flush (WatchRun, Flush)"),
        },
        "no RPC carries it here",
    ),
    "recommendation": (
        {
            "cos": _any("it scores by the factors that it keeps, before seen items are filtered (Recommend)"),
            "client": _own("its own users' (Recommend)"),
            "operator": _any(
                "in place of the user's application towards a hosted user (UserAgent.Recommend)"
            ),
        },
        "goes to the user only (Recommend)",
    ),
}

_DRIFT_ONLY = (
    "sealed_record",
    "record_count",
    "user_factor",
    "user_gradient",
    "item_gradient",
    "requested_rows",
    "block_loss",
    "block_count",
)

_MASKED_ONLY = ("masked_vector", "round_key", "sealed_share", "revealed_share")

_NOT_SHARED: Mapping[str, _Row] = dict.fromkeys(
    ("sealed_model", "cohort_metric"), _nobody("participants share no key here: the server has the model")
)

_NOT_ENCRYPTED: Mapping[str, _Row] = dict.fromkeys(
    ("encrypted_vector", "encrypted_sum"), _nobody("nothing is summed under a key here")
)

_WHOLE: Mapping[str, _Row] = {"sent_places": _nobody("contributions are whole: they have all parts")}

_FEDNCF: Mapping[str, _Row] = {
    **_SHARED,
    **_NO_SIDE_INFORMATION,
    **_NOT_SHARED,
    **_WHOLE,
    **dict.fromkeys(
        (*_DRIFT_ONLY, *_SHIELDED_ONLY), _nobody("owners learn nothing from users here: no RPC carries it")
    ),
    "interaction": (
        {"client": _own("the user's own, kept in its host's store (RecordInteraction)")},
        "interactions never leave the host of their user: it trains where they are",
    ),
    "history": (
        {"client": _own("the user's own, kept in its host's store (RecordInteraction)")},
        "a history never leaves the host of its user; what a contribution tells of it is a kind of its own",
    ),
    "private_state": (
        {"client": _own("its users' own, kept in its store; used by the next round and for recommendations")},
        "is part of no contribution and of no other message",
    ),
    "round_sum": (
        {"cos": _any("what a round is for: it changes the model, and metrics become means (Submit)")},
        "goes no further; two versions of the model show what it changed (Fetch)",
    ),
    "item_support": (
        {"cos": _any("each group's once, to find the items that are open to it; touch = once (Submit)")},
        "only the list of open items goes further (Fetch)",
    ),
    "open_items": _everybody(
        "which items a group may train (Fetch)", _RUN_PARTIES, otherwise="takes no part in runs"
    ),
    "cohort": (
        {
            "cos": _any("it draws the cohorts, and hears who contributes (Submit)"),
            "client": _any("members check who is in their sum before they take part (Fetch)"),
        },
        "is told to hosts of users only (Fetch)",
    ),
    "recommendation": (
        {
            "client": _own("scored at the host, by the model and the user's own embedding"),
            "operator": _any(
                "in place of the user's application towards a hosted user (UserAgent.Recommend)"
            ),
        },
        "goes to the user only: hosts score by themselves",
    ),
}
"""Rows of FedNCF that do not depend on who is a member of a sum, nor on how it is formed."""

_OF_ONE_USER = ("user_update", "user_metric", "user_items")
_OF_A_HOST = ("host_update", "metric_sum", "host_items")


def _fedncf(form: str, secure_sum: str) -> dict[str, _Row]:
    """Return the rows of FedNCF.

    Parameters
    ----------
    form : {"hosts", "users"}
        Whether a host is one member of a sum for all its users in the cohort, or every user is a member.
    secure_sum : {"clear", "masked", "encrypted", "shared-key"}
    """
    at_host = {"client": _own("computed at the user's own host")}
    added_up = {"client": _own("it adds up its own users")}
    clear, hosts = secure_sum == "clear", form == "hosts"
    hidden = {"masked": "under masks", "encrypted": "encrypted", "shared-key": "encrypted"}.get(
        secure_sum, ""
    )
    if not clear:
        one = (at_host, f"leaves its host only {hidden}, as part of a sum (Submit)")
    elif hosts:
        alone = _own(
            "of a user who is the only one of its host in the cohort: the host's sum is its own (Submit)"
        )
        one = (at_host | {"cos": alone}, "goes to the COS only, as part of its host's sum (Submit)")
    else:
        each = _any("each user is a member of its own: a leak, secure_sum = masked stops it (Submit)")
        one = (at_host | {"cos": each}, "goes to the COS only (Submit)")
    if not hosts:
        several = _nobody("every user is a member of its own: no host adds up its users")
    elif clear:
        several = (
            added_up | {"cos": _any("one sum of each host in the cohort (Submit)")},
            "goes to the COS only (Submit)",
        )
    else:
        several = (added_up, f"leaves the host only {hidden} (Submit)")
    no_masks = dict.fromkeys(
        _MASKED_ONLY, _nobody(f"a sum {secure_sum if not clear else 'in clear'} has no masks")
    )
    return {
        **_FEDNCF,
        **dict.fromkeys(_OF_ONE_USER, one),
        **dict.fromkeys(_OF_A_HOST, several),
        **{
            "clear": {**no_masks, **_NOT_ENCRYPTED},
            "masked": {**_MASKED, **_NOT_ENCRYPTED},
            "encrypted": {**no_masks, **_ENCRYPTED},
            "shared-key": {**no_masks, **_SHARED_KEY},
        }[secure_sum],
    }


_FEDMVMF: Mapping[str, _Row] = {
    "user_attributes": (
        {"client": _own("of its own users, from a file that its host was given")},
        "leave the host only inside a contribution, as what a round's sum makes of them",
    ),
    "item_features": (
        {"data-owner": _own("of its own items, from a file that it was given")},
        "leave their owner only as the rows that it makes of them (Submit)",
    ),
    "item_pull": (
        {
            "data-owner": _own("it computes it from its features and the model (Submit)"),
            "cos": _any("it adds it to the gradient of the item, or ranks a new item by it (Submit)"),
        },
        "goes no further; of new items it is the row that the model has (Fetch)",
    ),
    "item_support": (
        {
            "cos": _any("each group's once, to find the items that are open to it (Submit)"),
            "client": _any("of all groups together, of open items: unrated items are drawn by it (Fetch)"),
            "data-owner": _any(
                "of all groups together, of open items: it tells new items from others (Fetch)"
            ),
        },
        "takes no part in the learning: no RPC carries it here",
    ),
}
"""Rows of FedMVMF that are not those of FedNCF."""


def _fedmvmf(form: str, secure_sum: str) -> dict[str, _Row]:
    """Return the rows of FedMVMF: those of FedNCF, and what attributes and features add."""
    rows = {**_fedncf(form, secure_sum), **_FEDMVMF, **_SPARSE.get(secure_sum, {})}
    if secure_sum == "encrypted":
        by_role, otherwise = rows["item_support"]
        decrypts = {"decrypting-client": _ENCRYPTED["item_support"][0]["decrypting-client"]}
        rows["item_support"] = ({**by_role, **decrypts}, otherwise)
    return rows


def _fedmf(form: str, secure_sum: str) -> dict[str, _Row]:
    """Return the rows of FedMF."""
    return {**_fedncf(form, secure_sum), **_SPARSE.get(secure_sum, {})}


_SPARSE: Mapping[str, Mapping[str, _Row]] = {
    "encrypted": {
        "sent_places": (
            {
                "client": _own("it says what it left out; only in runs with encryption.sparse (Submit)"),
                "cos": _any("it fills in what was left out; only in runs with encryption.sparse (Submit)"),
                "decrypting-client": _any(
                    "it checks how many users are in each place; only in runs with encryption.sparse (Fetch)"
                ),
            },
            "goes to the COS and those who decrypt only; without encryption.sparse contributions are whole",
        )
    },
    "shared-key": {
        "sent_places": (
            {
                "client": _any(
                    "they check how many users are in each place; only in runs with encryption.sparse (Fetch)"
                ),
                "cos": _any("it fills in what was left out; only in runs with encryption.sparse (Submit)"),
            },
            "goes to the COS and those who hold the key only; without encryption.sparse contributions are whole",
        )
    },
}
"""Rows of systems whose contributions may leave parts out, by secure sum."""

_ENCRYPTED: Mapping[str, _Row] = {
    "encrypted_vector": (
        {
            "client": _own("it encrypts its own (Submit)"),
            "cos": _any("it multiplies them: so their contents are added (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
    "encrypted_sum": (
        {
            "cos": _any("what it has made of the contributions (Fetch)"),
            "decrypting-client": _any(
                "a part, to decrypt once a majority of them has seen whose sum it is (Fetch)"
            ),
        },
        "goes to decrypting clients only (Fetch)",
    ),
    "round_key": (
        {
            "cos": _any("signatures of decrypting clients, passed on between them (Submit, Fetch)"),
            "decrypting-client": _any("they check each other's signatures of the list of submitters (Fetch)"),
        },
        "goes to decrypting clients only, through the COS",
    ),
    "round_sum": (
        {
            "cos": _any("what a round is for: it changes the model, and metrics become means (Submit)"),
            "decrypting-client": _any("the parts that it decrypts (Submit)"),
        },
        "goes no further; two versions of the model show what it changed (Fetch)",
    ),
    "item_support": (
        {
            "cos": _any("each group's once, to find the items that are open to it; touch = once (Submit)"),
            "decrypting-client": _any("the parts of each group's sum that it decrypts (Submit)"),
        },
        "only the list of open items goes further (Fetch)",
    ),
    "cohort": (
        {
            "cos": _any("it draws the cohorts, and hears who contributes (Submit)"),
            "client": _any("members check who is in their sum before they take part (Fetch)"),
            "decrypting-client": _any("it checks who is in the sum that it decrypts (Fetch)"),
        },
        "is told to hosts of users and decrypting clients only (Fetch)",
    ),
}

_SHARED_KEY: Mapping[str, _Row] = {
    "encrypted_vector": _ENCRYPTED["encrypted_vector"],
    "encrypted_sum": (
        {
            "cos": _any("what it has made of the contributions (Fetch)"),
            "client": _any("to apply it, once a majority of them has seen whose sum it is (Fetch)"),
        },
        "goes to those hosts only that hold the key (Fetch)",
    ),
    "sealed_model": (
        {
            "client": _any("they open it, and seal the next version (Fetch, Submit)"),
            "cos": _any("it keeps what it cannot open, and hands it out (Submit, Fetch)"),
            "data-owner": _any("they may fetch what they cannot open (Fetch)"),
        },
        "goes to parties of the run only",
    ),
    "cohort_metric": (
        {
            "client": _any("those who apply a sum add up what it says of metrics (Submit)"),
            "cos": _any("of rounds of training, over whole cohorts (Submit)"),
        },
        "goes no further",
    ),
    "round_key": (
        {
            "cos": _any("signatures of those who hold the key, passed on between them (Submit, Fetch)"),
            "client": _any("they check each other's signatures of the list of submitters (Fetch)"),
        },
        "goes to hosts only, through the COS",
    ),
    "round_sum": (
        {
            "client": _any("those who hold the key open it to change the model (Fetch)"),
            "cos": _own("of an evaluation: metrics and nothing else (Submit)"),
        },
        "goes no further: those who open it seal what they make of it",
    ),
    "item_support": (
        {"client": _any("each group's once, to find the items that are open to it; touch = once (Fetch)")},
        "is in the model's versions only, which participants open",
    ),
    "open_items": (
        {"client": _any("in the model's versions, which they open (Fetch)")},
        "follows from the model's versions, which participants open",
    ),
    "item_factor": (
        {"client": _any("the shared model, once it is opened (Fetch)")},
        "the server keeps and hands out versions that it cannot open (Submit, Fetch)",
    ),
}

_MASKED: Mapping[str, _Row] = {
    "masked_vector": (
        {
            "client": _own("it masks its own (Submit)"),
            "cos": _any("it adds them up; the masks leave with the last of them (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
    "round_key": (
        {
            "client": _any("members check the keys and signatures of their neighbours (Fetch)"),
            "cos": _any("it passes them on between members (Submit, Fetch)"),
        },
        "goes to members only, through the COS",
    ),
    "sealed_share": (
        {
            "client": _own("it seals its own, and opens those that are for it (Submit, Fetch)"),
            "cos": _any("it passes them on between members, unopened (Submit, Fetch)"),
        },
        "goes to one member only, through the COS",
    ),
    "revealed_share": (
        {
            "client": _own(
                "it reveals shares that it holds, one of the two secrets of each neighbour (Submit)"
            ),
            "cos": _any("it removes the masks of the sum by them (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
}

_DRIFT_SHIELDED: Mapping[str, _Row] = {
    **_DRIFT_PUBLISHED,
    **_NOT_ENCRYPTED,
    **dict.fromkeys(
        ("requested_rows", "item_support", "open_items", "private_state", "user_update", "host_update"),
        _nobody("the shielded form has nothing of the kind: no RPC carries it"),
    ),
    **dict.fromkeys(("user_items", "host_items"), _nobody("nobody is asked for items: no RPC carries it")),
    "user_factor": (
        {
            "client": _own("drawn and kept at the user's own host, changed by the owners that it visits"),
            "data-owner": _own("sealed for it by the users who visit it (SubmitInteractions, UpdateVector)"),
        },
        "is sealed between user and owner, and the server keeps no Upsilon (SubmitInteractions, UpdateVector)",
    ),
    "user_gradient": (
        {
            "data-owner": _own("it computes the step of a user who visits (UpdateVector)"),
            "client": _own("its users' own, sealed for them (UpdateVector)"),
        },
        "goes back to the user, sealed (UpdateVector)",
    ),
    "item_gradient": (
        {"data-owner": _own("it computes it, and holds it back")},
        "leaves its owner only summed over at least k_min users, in a window (Submit)",
    ),
    "sealed_reply": (
        {
            "data-owner": _own("it seals the replies to its visitors (UpdateVector)"),
            "client": _own("its users' own (UpdateVector)"),
        },
        "goes from owner to client directly (UpdateVector)",
    ),
    "visit_count": (
        {
            "data-owner": _own("its own (Submit)"),
            "cos": _any("from this it knows when a window is due; not who came (Submit)"),
            "operator": _any("in all, in the report (GetReport)"),
        },
        "no RPC carries it here",
    ),
    "block_loss": (
        {
            "data-owner": _own("it computes it"),
            "client": _own("of its users' own blocks, sealed for them (UpdateVector)"),
        },
        "leaves as a metric inside a sum over users only (Submit)",
    ),
    "block_count": (
        {
            "data-owner": _own("its own blocks"),
            "client": _own("its users' own, sealed for them (UpdateVector)"),
        },
        "no RPC carries it here",
    ),
    "user_metric": (
        {"client": _own("each user's metrics are computed at its own host")},
        "leaves as part of its host's sum only (Submit)",
    ),
    "round_sum": (
        {
            "cos": _any(
                "what a window or an evaluation is for: it steps Psi, and metrics become means (Submit)"
            )
        },
        "goes no further; two versions of the model show what it changed (Fetch)",
    ),
    "cohort": (
        {
            "cos": _any("owners and hosts that are present, and who contributes (Submit)"),
            "data-owner": _any("members check who is in their window before they join (Fetch)"),
            "client": _any("members check who is in their evaluation before they take part (Fetch)"),
        },
        "is told to members only (Fetch)",
    ),
    "recommendation": (
        {
            "client": _own("scored at the host, by the model and the user's own row"),
            "operator": _any(
                "in place of the user's application towards a hosted user (UserAgent.Recommend)"
            ),
        },
        "goes to the user only: hosts score by themselves",
    ),
}
"""Rows of the shielded form that do not depend on how its sums are formed."""


def _drift_shielded(secure_sum: str) -> dict[str, _Row]:
    """Return the rows of DRIFT's shielded form under a sum."""
    own_window = {"data-owner": _own("what it hands over itself (Submit)")}
    added_up = {"client": _own("it adds up its own users (Submit)")}
    if secure_sum == "clear":
        return {
            **_DRIFT_SHIELDED,
            **dict.fromkeys(_MASKED_ONLY, _nobody("a sum in clear has no masks")),
            "window_vector": (
                own_window | {"cos": _any("one vector of each owner that joins a window (Submit)")},
                "goes to the COS only (Submit)",
            ),
            "metric_sum": (
                added_up | {"cos": _any("one sum of each host with at least min_users users (Submit)")},
                "only means over all hosts go further (WatchRun)",
            ),
        }
    masked: dict[str, _Row] = {
        kind: ({**by_role, "data-owner": by_role["client"]}, otherwise)
        for kind, (by_role, otherwise) in _MASKED.items()
    }
    return {
        **_DRIFT_SHIELDED,
        **masked,
        "window_vector": (own_window, "leaves its owner only under masks (Submit)"),
        "metric_sum": (added_up, "leaves the host only under masks (Submit)"),
    }


DECLARED: Mapping[tuple[str, str, str], Mapping[str, _Row]] = {
    ("drift", "published", "clear"): _DRIFT_PUBLISHED,
    ("drift", "shielded", "clear"): _drift_shielded("clear"),
    ("drift", "shielded", "masked"): _drift_shielded("masked"),
    **{
        (system, form, secure_sum): rows(form, secure_sum)
        for system, rows, sums in (
            ("fedncf", _fedncf, ("clear", "masked", "encrypted", "shared-key")),
            ("fedmvmf", _fedmvmf, ("clear", "masked", "encrypted")),
            # They send nothing else of a kind that FedNCF does not: no side information, and no counts to clients.
            ("fedmf", _fedmf, ("clear", "masked", "encrypted", "shared-key")),
            ("fcf", _fedncf, ("clear", "masked", "encrypted", "shared-key")),
        )
        for form in ("hosts", "users")
        for secure_sum in sums
    },
}
"""Rows by system, form and secure sum, as in the run plan; the form of systems with rounds says who is a member."""
