"""Kinds of datum, and the rows with which a system declares the roles that may see each of them.

A row says who may see one kind.  The rows here hold for every system, or belong to a secure sum; a system's folder
has its own (``declared.py``).  The table in docs/threat-model.md is made from these rows, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coterie.privacy.fields import MISPLACED, UNCLASSIFIED

__all__ = [
    "DENOISED",
    "ENCRYPTED",
    "KINDS",
    "MASKED",
    "MASKED_ONLY",
    "NOT_ENCRYPTED",
    "NOT_SHARED",
    "NO_DENOISERS",
    "NO_SIDE_INFORMATION",
    "OWNERS_LEARN_ONLY",
    "REGISTERED",
    "ROLES",
    "ROUNDS_ONLY",
    "RUN_PARTIES",
    "SHARED",
    "SHARED_KEY",
    "SIDE_INFORMATION",
    "SPARSE",
    "WHOLE",
    "WINDOWS_ONLY",
    "Access",
    "AccessRow",
    "AccessRows",
    "anything",
    "everybody",
    "nobody",
    "own",
]

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
        "user_noise": "what a user adds to its contribution to hide its items: sampled items and their changes",
        "sealed_noise": "a user's noise, sealed for one denoiser",
        "noise_sum": "the sum of the noise of a group of users",
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
        "population": "who takes part in a run, and at which host",
        "cohort": "who is in a group, in a round, at which host, and who contributed",
        "recommendation": "the items recommended to a user, their scores, how many were asked for",
        "preference": "what a user has set for itself at its host, such as the share of its updates that it sends",
        "disclosure": "the receipt of what has left a user's device",
        "item_key": "the external key of an item",
        "holding": "which owner holds which items",
        "participant_id": "the pseudonym of a participant, SHA-256 of its public key",
        "slot": "the number of a participant within a run",
        "public_key": "key bundles, certificates, prekeys and the signatures on them",
        "secret_key": "a private key",  # pragma: allowlist secret
        "sealed_key": "a Paillier key's or a graph key's secret, sealed for one of its holders",
        "sealed_expansion": "a user's request to an expansion service, or the answer, sealed for the other side",
        "upload_id": "the random id of a user's upload to an expansion service",
        "item_tag": "tags of a user's items under a key that users share, with the secret of their upload",
        "sealed_embedding": "a user's embedding, sealed to the holders of a graph key",
        "latent_ciphertext": "a user's latent vector under a Paillier key, with the secret of its upload",
        "pseudo_latent": "a weighted mean of a few users' latent vectors, under that key",
        "latent_counts": "how many users' latent vectors a set has",
        "graph_counts": "how many uploads, tags, questions and refusals a graph has, over all users",
        "enrolment_token": "a one-time token for enrolment",
        "delegation": "a participant's statement that a connection speaks for it",
        "endpoint": "logical name, role and address of a service",
        "plan": "what a run learns and how",
        "latency": "how long messages between two services take, and how much their connection carries",
        "run_state": "phase, epoch, version and counters of a run",
        "protocol": "sequence numbers, cursors, hashes, deadlines",
        MISPLACED: "a field for data owners in a message of a client or a key holder",
        UNCLASSIFIED: "a field of a message that has no kind yet",
    }
)
"""Every kind of datum, with its description."""


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


def anything(why: str) -> Access:
    """Return the access of a role that may see every datum of a kind."""
    return Access(True, why)


def own(why: str) -> Access:
    """Return the access of a role that may see only its own data of a kind."""
    return Access(True, why, own_only=True)


AccessRow = tuple[Mapping[str, Access], str]
"""Access to a kind of datum by role, and why other roles have none."""

AccessRows = Mapping[str, AccessRow]
"""Rows by kind of datum."""


def everybody(why: str, roles: Iterable[str] = ROLES, *, otherwise: str = "") -> AccessRow:
    """Return a row in which ``roles`` may see every datum of a kind; ``otherwise`` says why other roles may not."""
    return {role: anything(why) for role in roles}, otherwise


def nobody(why: str) -> AccessRow:
    """Return a row in which nobody may see a kind."""
    return {}, why


RUN_PARTIES = ("cos", "data-owner", "client")
REGISTERED = (*RUN_PARTIES, "decrypting-client")

SHARED: Mapping[str, AccessRow] = {
    "user_name": (
        {"client": own("the user's application names the user to its host (UserAgent)")},
        "a user is a key's SHA-256 beyond its host; no message of any other service has a name (Participant)",
    ),
    "metric_mean": everybody(
        "a mean over all hosts or owners that reported (WatchRun)",
        ("cos", "operator"),
        otherwise="no RPC carries it here",
    ),
    "item_factor": everybody(
        "the shared model (Fetch; in DRIFT also Exchange)",
        RUN_PARTIES,
        otherwise="takes no part in the learning: no RPC carries it here",
    ),
    "preference": (
        {
            "client": own(
                "its users' own, kept in its store; only its effect is in contributions (SetPreferences)"
            ),
            "operator": anything(
                "in place of the user's application towards a hosted user (SetPreferences, ShowPreferences)"
            ),
        },
        "is part of no contribution and of no other message",
    ),
    "disclosure": (
        {
            "client": own("written from its own send log (DisclosureReceipt)"),
            "operator": anything(
                "in place of the user's application towards a hosted user (DisclosureReceipt)"
            ),
        },
        "goes to the user only (DisclosureReceipt)",
    ),
    "item_key": everybody(
        "public by design: the catalogue, and the lists made from it (Register, Fetch)",
        (*RUN_PARTIES, "operator"),
        otherwise="keeps keys of participants, not of items: no RPC carries it here",
    ),
    "holding": everybody(
        "public by design: clients look up an item's owners in the catalogue (Fetch)",
        RUN_PARTIES,
        otherwise="no RPC carries it here",
    ),
    "participant_id": everybody("a pseudonym that says nothing but which key it is (Lookup, Fetch)"),
    "population": (
        {
            "cos": anything("it gathers them (Register)"),
            "client": anything("hosts check who is summed with them (Fetch)"),
            "thirdparty": anything(
                "it checks users against their enrolments, and draws the beacon (CommitPopulation, ExtendPopulation)"
            ),
        },
        "no RPC carries it here",
    ),
    "slot": everybody(
        "numbers participants within a run (Register, Fetch)",
        REGISTERED,
        otherwise="takes no part in runs: no RPC carries it here",
    ),
    "public_key": everybody("public (Enrol, Lookup)"),
    "secret_key": (
        {role: own("its own, or its participants', in files of mode 0600") for role in ROLES},
        "no private key leaves the party that made it, but a Paillier key, sealed for its holders (sealed_key)",
    ),
    "sealed_key": (
        {
            "client": own(
                "its participants', or those that it sealed (PaillierEnvelope, PublishPaillierKey)"
            ),
            "decrypting-client": own(
                "its own, or those that it sealed (PaillierEnvelope, PublishPaillierKey)"
            ),
            "thirdparty": anything("it relays what only holders can open (PublishPaillierKey)"),
        },
        "goes through the third party to holders only (PaillierEnvelope)",
    ),
    "sealed_expansion": (
        {
            "client": own(
                "it seals its own users' requests; in runs with a graph key or meta-latents (Relay, RelayLatent)"
            ),
            "cos": anything(
                "it relays what it cannot open; in runs with a graph key or meta-latents (Relay, RelayLatent)"
            ),
            "thirdparty": anything(
                "it opens requests without their senders (PublishTags, Neighbours, PublishEncrypted)"
            ),
        },
        "goes through the COS to the third party only (Relay)",
    ),
    "upload_id": (
        {
            "client": own("it draws them; in runs with a graph key or meta-latents (Relay, RelayLatent)"),
            "cos": anything("it knows whose upload it is, and not what is in it (Relay, RelayLatent)"),
            "thirdparty": anything("it knows what is in it, not whose it is (PublishTags, PublishEncrypted)"),
        },
        "goes through the COS to the third party only (Relay)",
    ),
    "item_tag": (
        {
            "client": own("it computes them; only in runs with a graph key (Relay)"),
            "thirdparty": anything("it matches tags without the key that they are made with (PublishTags)"),
        },
        "is sealed to the third party (PublishTags)",
    ),
    "sealed_embedding": (
        {
            "client": anything(
                "members of the graph open those of their neighbours, without names (Neighbours)"
            ),
            "thirdparty": anything("it hands out what it cannot open (Neighbours)"),
        },
        "is sealed to the third party, and again to clients (PublishTags)",
    ),
    "latent_ciphertext": (
        {
            "client": own("it encrypts its own users' vectors; only in runs with meta-latents (RelayLatent)"),
            "thirdparty": anything("it combines what it cannot decrypt (PublishEncrypted)"),
        },
        "is sealed to the third party (PublishEncrypted)",
    ),
    "pseudo_latent": (
        {
            "client": anything("holders of the Paillier key decrypt them (PseudoMetaLatents)"),
            "thirdparty": anything("it forms what it cannot decrypt (PseudoMetaLatents)"),
        },
        "goes to holders of the Paillier key only (PseudoMetaLatents)",
    ),
    "latent_counts": everybody(
        "a number over all users of a set (LatentSet)",
        ("thirdparty", "client"),
        otherwise="no RPC carries it here",
    ),
    "graph_counts": everybody(
        "counters over all uploads (ExpansionState)",
        ("thirdparty", "operator"),
        otherwise="no RPC carries it here",
    ),
    "enrolment_token": (
        {
            "thirdparty": anything("it exchanges tokens for certificates (Enrol)"),
            "operator": anything("it hands tokens out"),
            **{role: own("its own, used once (Enrol)") for role in REGISTERED},
        },
        "",
    ),
    "delegation": (
        {
            "cos": anything("it checks who speaks for a participant (Register)"),
            "client": own("its participants sign it (Register)"),
            "data-owner": own("its participants sign it (Register)"),
            "decrypting-client": own("it signs its own (Register)"),
        },
        "no RPC carries it here",
    ),
    "endpoint": everybody("how services find and verify each other (Register, Fetch, Enrol)"),
    "plan": everybody(
        "everybody in a run can verify its plan (Register, StartRun)",
        (*REGISTERED, "operator"),
        otherwise="takes no part in runs: no RPC carries it here",
    ),
    "latency": (
        {
            "cos": anything("its own, and what parties bring for the operator (Attend)"),
            "data-owner": own("it measures to those that it calls (Attend)"),
            "client": own("it measures to those that it calls (Attend)"),
            "decrypting-client": own("it measures to those that it calls (Attend)"),
            "operator": anything("it has services measure (Measure)"),
        },
        "calls nobody, and no RPC carries it here",
    ),
    "run_state": everybody(
        "counters over everybody (WatchRun)", ("cos", "operator"), otherwise="no RPC carries it here"
    ),
    "protocol": everybody("the protocol's own numbers"),
    MISPLACED: ({}, "users have no name, no address and no items in messages (Register)"),
    UNCLASSIFIED: ({}, "give the field a kind in coterie/privacy/fields.py"),
}
"""Rows that are the same for every system."""

ROUNDS_ONLY = (
    "private_state",
    "user_update",
    "host_update",
    "user_items",
    "host_items",
    "user_noise",
    "sealed_noise",
    "noise_sum",
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
    "population",
    "cohort",
)

WINDOWS_ONLY = ("sealed_reply", "window_vector", "visit_count")

SIDE_INFORMATION = ("user_attributes", "item_features", "item_pull")

NO_SIDE_INFORMATION: Mapping[str, AccessRow] = dict.fromkeys(
    SIDE_INFORMATION, nobody("the system has no use for attributes and features: nobody is given any")
)

OWNERS_LEARN_ONLY = (
    "sealed_record",
    "record_count",
    "user_factor",
    "user_gradient",
    "item_gradient",
    "requested_rows",
    "block_loss",
    "block_count",
)

MASKED_ONLY = ("masked_vector", "round_key", "sealed_share", "revealed_share")

NOT_SHARED: Mapping[str, AccessRow] = dict.fromkeys(
    ("sealed_model", "cohort_metric"), nobody("participants share no key here: the server has the model")
)

NOT_ENCRYPTED: Mapping[str, AccessRow] = dict.fromkeys(
    ("encrypted_vector", "encrypted_sum"), nobody("nothing is summed under a key here")
)

NO_DENOISERS: Mapping[str, AccessRow] = dict.fromkeys(
    ("user_noise", "sealed_noise", "noise_sum"), nobody("there are no denoisers here")
)

DENOISED: Mapping[str, AccessRow] = {
    "user_noise": (
        {
            "client": anything(
                "denoisers open it, of users of other hosts: sampled items, and the direction of the user's embedding "
                "(Fetch)"
            )
        },
        "goes to two denoisers only, sealed; with one of them the COS tells it from the rest",
    ),
    "sealed_noise": (
        {
            "client": own("it seals its users', and opens what is for it as a denoiser (Submit, Fetch)"),
            "cos": anything("it passes it on to denoisers, unopened (Submit, Fetch)"),
        },
        "goes to two denoisers only, through the COS",
    ),
    "noise_sum": (
        {
            "client": own("of the groups that it denoises (Submit)"),
            "cos": anything("it takes noise out of the sum by it (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
}
"""Rows of sums whose noise denoisers take out."""

WHOLE: Mapping[str, AccessRow] = {"sent_places": nobody("contributions are whole: they have all parts")}

SPARSE: Mapping[str, Mapping[str, AccessRow]] = {
    "encrypted": {
        "sent_places": (
            {
                "client": own("it says what it left out; only in runs with encryption.sparse (Submit)"),
                "cos": anything(
                    "it fills in what was left out; only in runs with encryption.sparse (Submit)"
                ),
                "decrypting-client": anything(
                    "it checks how many users are in each place; only in runs with encryption.sparse (Fetch)"
                ),
            },
            "goes to the COS and those who decrypt only; without encryption.sparse contributions are whole",
        )
    },
    "shared-key": {
        "sent_places": (
            {
                "client": anything(
                    "they check how many users are in each place; only in runs with encryption.sparse (Fetch)"
                ),
                "cos": anything(
                    "it fills in what was left out; only in runs with encryption.sparse (Submit)"
                ),
            },
            "goes to the COS and those who hold the key only; without encryption.sparse contributions are whole",
        )
    },
}
"""Rows of systems whose contributions may leave parts out, by secure sum."""

ENCRYPTED: Mapping[str, AccessRow] = {
    "encrypted_vector": (
        {
            "client": own("it encrypts its own (Submit)"),
            "cos": anything("it multiplies them: so their contents are added (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
    "encrypted_sum": (
        {
            "cos": anything("what it has made of the contributions (Fetch)"),
            "decrypting-client": anything(
                "a part, to decrypt once a majority of them has seen whose sum it is (Fetch)"
            ),
        },
        "goes to decrypting clients only (Fetch)",
    ),
    "round_key": (
        {
            "cos": anything("signatures of decrypting clients, passed on between them (Submit, Fetch)"),
            "decrypting-client": anything(
                "they check each other's signatures of the list of submitters (Fetch)"
            ),
        },
        "goes to decrypting clients only, through the COS",
    ),
    "round_sum": (
        {
            "cos": anything("what a round is for: it changes the model, and metrics become means (Submit)"),
            "decrypting-client": anything("the parts that it decrypts (Submit)"),
        },
        "goes no further; two versions of the model show what it changed (Fetch)",
    ),
    "item_support": (
        {
            "cos": anything(
                "each group's once, to find the items that are open to it; touch = once (Submit)"
            ),
            "decrypting-client": anything("the parts of each group's sum that it decrypts (Submit)"),
        },
        "only the list of open items goes further, and their coarse levels where popularity has a weight (Fetch)",
    ),
    "cohort": (
        {
            "cos": anything("it draws the cohorts, and hears who contributes (Submit)"),
            "client": anything("members check who is in their sum before they take part (Fetch)"),
            "decrypting-client": anything("it checks who is in the sum that it decrypts (Fetch)"),
        },
        "is told to hosts of users and decrypting clients only (Fetch)",
    ),
}

SHARED_KEY: Mapping[str, AccessRow] = {
    "encrypted_vector": ENCRYPTED["encrypted_vector"],
    "encrypted_sum": (
        {
            "cos": anything("what it has made of the contributions (Fetch)"),
            "client": anything("to apply it, once a majority of them has seen whose sum it is (Fetch)"),
        },
        "goes to those hosts only that hold the key (Fetch)",
    ),
    "sealed_model": (
        {
            "client": anything("they open it, and seal the next version (Fetch, Submit)"),
            "cos": anything("it keeps what it cannot open, and hands it out (Submit, Fetch)"),
            "data-owner": anything("they may fetch what they cannot open (Fetch)"),
        },
        "goes to parties of the run only",
    ),
    "cohort_metric": (
        {
            "client": anything("those who apply a sum add up what it says of metrics (Submit)"),
            "cos": anything("of rounds of training, over whole cohorts (Submit)"),
        },
        "goes no further",
    ),
    "round_key": (
        {
            "cos": anything("signatures of those who hold the key, passed on between them (Submit, Fetch)"),
            "client": anything("they check each other's signatures of the list of submitters (Fetch)"),
        },
        "goes to hosts only, through the COS",
    ),
    "round_sum": (
        {
            "client": anything("those who hold the key open it to change the model (Fetch)"),
            "cos": own("of an evaluation: metrics and nothing else (Submit)"),
        },
        "goes no further: those who open it seal what they make of it",
    ),
    "item_support": (
        {
            "client": anything(
                "each group's once, to find the items that are open to it; touch = once (Fetch)"
            )
        },
        "is in the model's versions only, which participants open",
    ),
    "open_items": (
        {"client": anything("in the model's versions, which they open (Fetch)")},
        "follows from the model's versions, which participants open",
    ),
    "item_factor": (
        {"client": anything("the shared model, once it is opened (Fetch)")},
        "the server keeps and hands out versions that it cannot open (Submit, Fetch)",
    ),
}

MASKED: Mapping[str, AccessRow] = {
    "masked_vector": (
        {
            "client": own("it masks its own (Submit)"),
            "cos": anything("it adds them up; the masks leave with the last of them (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
    "round_key": (
        {
            "client": anything("members check the keys and signatures of their neighbours (Fetch)"),
            "cos": anything("it passes them on between members (Submit, Fetch)"),
        },
        "goes to members only, through the COS",
    ),
    "sealed_share": (
        {
            "client": own("it seals its own, and opens those that are for it (Submit, Fetch)"),
            "cos": anything("it passes them on between members, unopened (Submit, Fetch)"),
        },
        "goes to one member only, through the COS",
    ),
    "revealed_share": (
        {
            "client": own(
                "it reveals shares that it holds, one of the two secrets of each neighbour (Submit)"
            ),
            "cos": anything("it removes the masks of the sum by them (Submit)"),
        },
        "goes to the COS only (Submit)",
    ),
}
