"""The visibility matrix of a system, and its audit against the bytes that each party held.

``matrix`` lays out a system's declarations.  ``audit`` compares them with everything that a party received,
stored, logged or exposed, by searching for canaries; ``observed`` reads the kinds of datum from the messages of a
transcript and needs no canaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coterie.errors import ConfigError
from coterie.privacy.canaries import Canary, CanaryKit
from coterie.privacy.declarations import KINDS, ROLES, Access, AccessRows
from coterie.privacy.observation import observed_kinds
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


def matrix(rows: AccessRows) -> dict[str, dict[str, Access]]:
    """Return the access of every role to every kind of datum.

    Parameters
    ----------
    rows : mapping
        Rows that a system declares (``System.declared``).

    Returns
    -------
    dict of str to dict of str to Access
        Access by role and kind; every role of ``ROLES`` and every kind of ``KINDS`` is there.

    Raises
    ------
    ConfigError
        A kind is not declared.
    """
    if missing := [kind for kind in KINDS if kind not in rows]:
        raise ConfigError(f"no visibility is declared for {', '.join(missing)}")
    return {
        role: {kind: rows[kind][0].get(role, Access(False, rows[kind][1])) for kind in KINDS}
        for role in ROLES
    }


def observed(transcripts: Mapping[str, Iterable[Path | str]]) -> dict[str, dict[str, bool]]:
    """Return the kinds of datum that passed each party, from its messages alone.

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
    """A canary that a party held and may not see.

    Attributes
    ----------
    party : str
        Party that held it.
    kind : str
        Kind of datum.
    source : str
        Place where it was found: the RPC and direction, or the file.
    why : str
        Reason why the party may not see it.
    """

    party: str
    kind: str
    source: str
    why: str


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes
    ----------
    seen : dict of str to dict of str to str
        ``"seen"`` or ``"not seen"`` by party and kind, for the kinds that have canaries.
    violations : tuple of Violation
        Canaries that parties held and may not see, each place once.
    """

    seen: dict[str, dict[str, str]] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()


class Audit:
    """Searches bytes that parties held for canaries, and compares the findings with the matrix.

    Parameters
    ----------
    canaries : CanaryKit
        Canaries to search for.
    rows : mapping
        Rows that the system declares (``System.declared``).
    """

    def __init__(self, canaries: CanaryKit, rows: AccessRows) -> None:
        self._kit = canaries
        self._matrix = matrix(rows)
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
            Bytes to search.

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
        """Return the findings so far."""
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
    rows: AccessRows,
    *,
    folders: Mapping[str, Iterable[Path | str]] | None = None,
) -> AuditResult:
    """Search transcripts, and folders of stores and logs, for canaries.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party.
    canaries : CanaryKit
        Canaries to search for.
    rows : mapping
        Rows that the system declares (``System.declared``).
    folders : mapping of str to iterable of Path, optional
        Further folders by party; every file in them is searched.

    Returns
    -------
    AuditResult
        Kinds seen by each party, and the violations among them.
    """
    search = Audit(canaries, rows)
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
