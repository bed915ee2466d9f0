"""Which party may see which kind of datum, and whether the bytes that it held agree.

``matrix`` declares it for each system, form and secure sum.  ``audit`` holds it against everything that a
party received, stored, logged or exposed, by searching for canaries; ``observed`` reads the kinds off the
messages of a transcript and needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from coterie.errors import ConfigError
from coterie.privacy.canaries import Canary, CanaryKit
from coterie.privacy.observation import UNCLASSIFIED, observed_kinds
from coterie.privacy.transcript import read_transcript, role_of

__all__ = [
    "KINDS",
    "ROLES",
    "Access",
    "Audit",
    "AuditResult",
    "CanaryKit",
    "Violation",
    "audit",
    "matrix",
    "observed",
]

ROLES = ("cos", "data-owner", "client", "thirdparty", "operator")
"""Roles of parties, as in certificates."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "interaction": "a user's item with its flag, in clear",
        "history": "a user's interactions at all owners together",
        "user_name": "a user's name on its host",
        "sealed_record": "an interaction sealed for one owner",
        "record_count": "how many records a user, or a host's users together, sent",
        "user_metric": "a metric of a single user",
        "metric_sum": "a metric summed over at least min_users users of a host",
        "metric_mean": "a metric, or the training loss, averaged over everybody who reported",
        "user_factor": "a row of Upsilon",
        "item_factor": "a row of Psi",
        "user_gradient": "the gradient of a user's row over an owner's blocks",
        "item_gradient": "the gradient of an item's row over an owner's blocks",
        "requested_rows": "users and items named together in one exchange",
        "block_loss": "the loss of an owner's blocks",
        "block_count": "how many blocks an owner has applied, of how many interactions",
        "recommendation": "the items recommended to a user, their scores, how many were asked for",
        "disclosure": "the receipt of what has left a user's device",
        "item_key": "the external key of an item",
        "holding": "which owner holds which items",
        "participant_id": "the pseudonym of a participant, SHA-256 of its public key",
        "slot": "the number of a participant within a run",
        "public_key": "key bundles, certificates, prekeys and the signatures on them",
        "secret_key": "a private key",
        "enrolment_token": "a one-time token for enrolment",
        "delegation": "a participant's statement that a connection speaks for it",
        "endpoint": "logical name, role and address of a service",
        "plan": "what a run learns and how",
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
        Whether it may see only what is its own: its users' or items', not another party's of the same role.
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


_RUN_PARTIES = ("cos", "data-owner", "client")

_DRIFT_PUBLISHED: Mapping[str, _Row] = {
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
    "user_name": (
        {"client": _own("the user's application names the user to its host (UserAgent)")},
        "a user is a key's SHA-256 beyond its host; no message of any other service has a name (Participant)",
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
    "metric_mean": _everybody(
        "a mean over all hosts or owners that reported (WatchRun)",
        ("cos", "operator"),
        otherwise="no RPC carries it here",
    ),
    "user_factor": (
        {
            "cos": _any("in the published form it keeps Upsilon (DRIFT, section 3; Exchange)"),
            "data-owner": _own("it computes on the rows of users in its blocks (Exchange)"),
            "client": _own("the rows of its own users, for scoring at the host (Fetch)"),
        },
        "no RPC carries it here",
    ),
    "item_factor": _everybody(
        "the shared model (Fetch, Exchange)",
        _RUN_PARTIES,
        otherwise="takes no part in the learning: no RPC carries it here",
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
        _RUN_PARTIES,
        otherwise="takes no part in runs: no RPC carries it here",
    ),
    "public_key": _everybody("public (Enrol, Lookup)"),
    "secret_key": (
        {role: _own("its own, or its participants', in files of mode 0600") for role in ROLES},
        "no private key leaves the party that made it",
    ),
    "enrolment_token": (
        {
            "thirdparty": _any("it exchanges tokens for certificates (Enrol)"),
            "operator": _any("it hands tokens out"),
            **{role: _own("its own, used once (Enrol)") for role in _RUN_PARTIES},
        },
        "",
    ),
    "delegation": (
        {
            "cos": _any("it checks who speaks for a participant (Register)"),
            "client": _own("its participants sign it (Register)"),
            "data-owner": _own("its participants sign it (Register)"),
        },
        "no RPC carries it here",
    ),
    "endpoint": _everybody("how services find and verify each other (Register, Fetch, Enrol)"),
    "plan": _everybody(
        "everybody in a run can verify its plan (Register, StartRun)",
        (*_RUN_PARTIES, "operator"),
        otherwise="takes no part in runs: no RPC carries it here",
    ),
    "run_state": _everybody(
        "counters over everybody (WatchRun)", ("cos", "operator"), otherwise="no RPC carries it here"
    ),
    "protocol": _everybody("the protocol's own numbers"),
    UNCLASSIFIED: ({}, "give the field a kind in coterie/privacy/observation.py"),
}

_DECLARED: Mapping[tuple[str, str, str], Mapping[str, _Row]] = {
    ("drift", "published", "clear"): _DRIFT_PUBLISHED,
}


def matrix(system: str, form: str, secure_sum: str) -> dict[str, dict[str, Access]]:
    """Return who may see what.

    Parameters
    ----------
    system, form, secure_sum : str
        As in the run plan: ``"drift"``, ``"published"``, ``"clear"``.

    Returns
    -------
    dict of str to dict of str to Access
        Access by role and kind; every role of ``ROLES`` and every kind of ``KINDS`` is there.

    Raises
    ------
    ConfigError
        When nothing is declared for the combination.
    """
    rows = _DECLARED.get((system, form, secure_sum))
    if rows is None:
        known = "; ".join(", ".join(each) for each in _DECLARED)
        raise ConfigError(
            f"no visibility is declared for {system}, {form}, {secure_sum}", hint=f"declared: {known}"
        )
    return {
        role: {kind: rows[kind][0].get(role, Access(False, rows[kind][1])) for kind in KINDS}
        for role in ROLES
    }


def observed(transcripts: Mapping[str, Iterable[Path | str]]) -> dict[str, dict[str, bool]]:
    """Return which kinds of datum passed each party, from the types of its messages alone.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party, ``"cos/cos"``.

    Returns
    -------
    dict of str to dict of str to bool
        Seen or not, by party and kind: received, or sent and so held.  An owner sees the interactions in the
        sealed records that are sent to it.
    """
    return {
        party: {kind: kind in seen for kind in KINDS} for party, seen in observed_kinds(transcripts).items()
    }


@dataclass(frozen=True)
class Violation:
    """A canary where it may not be.

    Attributes
    ----------
    party : str
        Who held it.
    kind : str
        What it was.
    source : str
        Where it was found: the RPC and direction, or the file.
    why : str
        Why that may not be.
    """

    party: str
    kind: str
    source: str
    why: str


@dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Attributes
    ----------
    seen : dict of str to dict of str to str
        ``"seen"`` or ``"not seen"`` by party and kind, for the kinds that have canaries.
    violations : tuple of Violation
        What was seen and may not be, each place once.
    """

    seen: dict[str, dict[str, str]] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()


class Audit:
    """Searches what parties held for canaries and compares with the matrix.

    Parameters
    ----------
    canaries : CanaryKit
        What was planted.
    system, form, secure_sum : str
        Which matrix applies.
    """

    def __init__(
        self,
        canaries: CanaryKit,
        *,
        system: str = "drift",
        form: str = "published",
        secure_sum: str = "clear",
    ) -> None:
        self._kit = canaries
        self._matrix = matrix(system, form, secure_sum)
        self._seen: dict[str, set[str]] = {}
        self._violations: dict[tuple[str, str, str], Violation] = {}

    def audit_bytes(self, party: str, source: str, data: bytes) -> set[str]:
        """Search bytes that a party held: a message, a log, a page of metrics.

        Parameters
        ----------
        party : str
            Role and name of the party.
        source : str
            Where the bytes are from, for the report.
        data : bytes
            What to search.

        Returns
        -------
        set of str
            Kinds of the canaries found.

        Raises
        ------
        ConfigError
            When the party's role is none of ``ROLES``.
        """
        role = role_of(party)
        if role not in self._matrix:
            raise ConfigError(f"party {party} has no role of ours", hint=f"roles: {', '.join(ROLES)}")
        found = self._kit.found(data)
        self._seen.setdefault(party, set()).update(canary.kind for canary in found)
        for canary in found:
            why = self._objection(party, self._matrix[role][canary.kind], canary)
            if why:
                violation = Violation(party, canary.kind, source, why)
                self._violations.setdefault((party, canary.kind, source), violation)
        return {canary.kind for canary in found}

    def audit_tree(self, party: str, folder: Path | str) -> set[str]:
        """Search every file below a folder (stores, logs, transcripts); links are not followed.

        Returns
        -------
        set of str
            Kinds of the canaries found.
        """
        root = Path(folder)
        found: set[str] = self.audit_bytes(party, str(root), b"")
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink():
                source = str(path.relative_to(root))
                for piece in _pieces(path, overlap=self._kit.longest - 1):
                    found |= self.audit_bytes(party, source, piece)
                # A file's name is stored too.
                found |= self.audit_bytes(party, f"name of {source}", source.encode())
        return found

    def audit_transcript(self, party: str, path: Path | str) -> set[str]:
        """Search every message of a transcript, received or sent.

        Returns
        -------
        set of str
            Kinds of the canaries found.
        """
        found: set[str] = self.audit_bytes(party, str(path), b"")
        batches: dict[str, bytearray] = {}
        for entry in read_transcript(path):
            source = f"{entry.rpc} {entry.direction}"
            batch = batches.setdefault(source, bytearray())
            batch += entry.payload
            # Many messages are searched at once, kept apart so that no canary comes about between two.
            batch += _BETWEEN
            if len(batch) >= _PIECE_BYTES:
                found |= self.audit_bytes(party, source, bytes(batch))
                batch.clear()
        for source, batch in batches.items():
            found |= self.audit_bytes(party, source, bytes(batch))
        return found

    def result(self) -> AuditResult:
        """Return what was found so far."""
        planted = dict.fromkeys(canary.kind for canary in self._kit.canaries)
        return AuditResult(
            seen={
                party: {kind: "seen" if kind in seen else "not seen" for kind in planted}
                for party, seen in self._seen.items()
            },
            violations=tuple(self._violations.values()),
        )

    @staticmethod
    def _objection(party: str, access: Access, canary: Canary) -> str:
        if not access.allowed:
            return access.why
        if access.own_only and canary.holders is not None and party not in canary.holders:
            return f"only its own, and this is that of {', '.join(sorted(canary.holders))}; {access.why}"
        return ""


def audit(
    transcripts: Mapping[str, Iterable[Path | str]],
    canaries: CanaryKit,
    *,
    system: str = "drift",
    form: str = "published",
    secure_sum: str = "clear",
    folders: Mapping[str, Iterable[Path | str]] | None = None,
) -> AuditResult:
    """Search transcripts, and folders of stores and logs, for canaries.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party.
    canaries : CanaryKit
        What was planted.
    system, form, secure_sum : str
        Which matrix applies.
    folders : mapping of str to iterable of Path, optional
        Further folders by party; every file in them is searched.

    Returns
    -------
    AuditResult
        What was seen by whom, and what of it may not be.
    """
    search = Audit(canaries, system=system, form=form, secure_sum=secure_sum)
    for party, paths in transcripts.items():
        for path in paths:
            search.audit_transcript(party, path)
    for party, roots in (folders or {}).items():
        for root in roots:
            search.audit_tree(party, root)
    return search.result()


_PIECE_BYTES = 16 << 20
_BETWEEN = b"\xff" * 8


def _pieces(path: Path, *, overlap: int) -> Iterator[bytes]:
    """Yield a file in pieces that overlap by ``overlap`` bytes, so that nothing is cut in two unseen."""
    with path.open("rb") as file:
        tail = b""
        while piece := file.read(_PIECE_BYTES):
            yield tail + piece
            tail = (tail + piece)[-overlap:] if overlap else b""
