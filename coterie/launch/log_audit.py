"""Audit of the third party's transparency log (``coterie audit log``): replays it, and judges what parties keep."""

from __future__ import annotations

import asyncio
import tomllib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.config.base import Peer
from coterie.config.operate import OperateSettings
from coterie.crypto.authority import PeerIdentity, issuer_of, logical_name
from coterie.crypto.merkle import Tree
from coterie.crypto.transparency import (
    BEACON,
    BUNDLE,
    CERTIFICATE,
    REVOCATION,
    Evidence,
    SignedHead,
    contradiction,
    entry_leaf,
)
from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError, PreflightError, RunError
from coterie.launch.local_run import LocalRun
from coterie.launch.operator_connection import OperatorConnection
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import DIRECTORY_KEY
from coterie.net.log_messages import head_from_wire
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.net.transparency import read_evidence, read_head
from coterie.process.runtime import in_use
from coterie.wire.v1 import log_pb2 as wire
from coterie.wire.v1.log_pb2_grpc import LogGossipStub, TransparencyLogStub

__all__ = ["Kept", "LogAudit", "Place", "judge_kept", "kept_in", "of_local_run", "of_operator", "replay"]

T = TypeVar("T")

_PER_PAGE = 1_000
_RETRY_S = 30.0
_LABELS: dict[str, bytes | tuple[bytes, ...]] = {
    BUNDLE: (b"coterie/v1/bundle-countersignature\0", b"coterie/v1/bundle-countersignature-2\0"),
    REVOCATION: b"coterie/v1/revocation\0",
    BEACON: b"coterie/v1/beacon\0",
}
"""How a statement of each kind begins; earlier releases signed bundles without their parties."""


@dataclass(frozen=True)
class Place:
    """The services to ask, and the certificate to show them.

    Parameters
    ----------
    tls : TlsFiles
        The operator's certificate.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    thirdparty : Peer
    cos : Peer, optional
        Shows the heads that it was shown.
    states : sequence of Path
        State folders of parties on this machine.
    """

    tls: TlsFiles
    directory_key: bytes
    thirdparty: Peer
    cos: Peer | None = None
    states: Sequence[Path] = ()


@dataclass(frozen=True)
class Kept:
    """The heads and the evidence that a party keeps.

    Parameters
    ----------
    where : str
        The party's folder, or its role and name.
    heads : sequence of SignedHead
    evidence : Evidence, optional
    """

    where: str
    heads: Sequence[SignedHead]
    evidence: Evidence | None = None


@dataclass
class LogAudit:
    """Result of an audit.

    Parameters
    ----------
    thirdparty : str
        Role and name.
    head : SignedHead
        The newest head.
    kinds : dict of str to int
        Number of entries by kind.
    several_keys : dict of str to int
        Number of keys that were certified, by role and name; only where there are several.
    compared : int
        Number of kept heads that were compared.
    problems : list of str
        What does not hold; empty when all is in order.
    """

    thirdparty: str
    head: SignedHead
    kinds: dict[str, int] = field(default_factory=dict)
    several_keys: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    problems: list[str] = field(default_factory=list)


def of_local_run(run: LocalRun) -> Place:
    """Return the place of a run in progress on this machine, with the state folders of all of its parties.

    Raises
    ------
    RunError
        The run is not running.
    CertificateError
        The run has no operator's certificate, or an expired one.
    """
    if not in_use(run.folder / "thirdparty" / "state"):
        raise RunError(
            f"run {run.run_id} is not running: there is no log to audit",
            hint="audit while it runs, or name the configuration of an operator (--config) or state folders (--state)",
        )
    tls = run.operator()
    return Place(
        tls,
        _directory_key(tls.folder.parent),
        _listening(run.folder / "thirdparty"),
        _listening(run.folder / "cos"),
        sorted(run.folder.glob("*/state")),
    )


async def of_operator(settings: OperateSettings, states: Sequence[Path]) -> Place:
    """Return the place that an operator's configuration names; enrol the operator when it has no certificate.

    Raises
    ------
    PreflightError
        The configuration names no third party, or the state folder cannot be used.
    CertificateError, PeerError
        The operator cannot enrol.
    """
    if settings.thirdparty is None:
        raise PreflightError(
            "the configuration names no third party",
            hint="add the section [thirdparty] with address and name",
        )
    try:
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PreflightError(f"cannot use the folder {error.filename}: {error.strerror}") from error
    operator = await OperatorConnection.enrolled(settings, settings.cos)
    await operator.close()
    return Place(
        TlsFiles(settings.state / "tls"),
        _directory_key(settings.state),
        settings.thirdparty,
        settings.cos,
        states,
    )


def _listening(folder: Path) -> Peer:
    path = folder / "config.toml"
    try:
        content = tomllib.loads(path.read_text())
        return Peer(address=str(content["listen"]), name=str(content["name"]))
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} does not say where the service listens: {error}") from error


def _directory_key(state: Path) -> bytes:
    try:
        return (state / DIRECTORY_KEY).read_bytes()
    except OSError as error:
        raise CertificateError(
            f"cannot read the directory's key in {state}: {error.strerror}", hint="enrol first"
        ) from error


def kept_in(state: Path) -> Kept:
    """Return what a party with this state folder keeps of the log.

    Raises
    ------
    StoreError
        A file is damaged.
    """
    head, _ = read_head(state)
    return Kept(str(state), [] if head is None else [head], read_evidence(state))


def judge_kept(states: Sequence[Path]) -> tuple[int, list[str]]:
    """Judge what parties keep by the signatures alone, without the log.

    Returns
    -------
    compared : int
        Number of heads.
    problems : list of str

    Raises
    ------
    CertificateError
        A folder has no directory's key.
    StoreError
        A file is damaged.
    """
    problems, heads = list[str](), list[tuple[str, SignedHead]]()
    for state in states:
        kept, key = kept_in(state), _directory_key(state)
        heads += [(kept.where, head) for head in _signed(kept, key, problems)]
        problems += _of_evidence(kept, key)
    problems += _contradictions(heads)
    return len(heads), problems


async def replay(place: Place, told: Callable[[str], None] = lambda _: None) -> LogAudit:
    """Fetch the whole log, compute its root again, and compare it with the heads that parties keep.

    Parameters
    ----------
    place : Place
    told : callable
        Told of progress.

    Raises
    ------
    PeerError
        The third party or the COS cannot be reached.
    CryptoError
        The third party signs no head.
    """
    channel = _open(place, "thirdparty", place.thirdparty)
    try:
        return await _replay(place, channel, told)
    finally:
        await channel.close()


async def _replay(place: Place, channel: Channel, told: Callable[[str], None]) -> LogAudit:
    stub: Any = channel.stub(TransparencyLogStub)
    head = head_from_wire((await _call(channel, lambda: stub.LogHead(wire.LogHeadRequest()))).head)
    head.verify(place.directory_key)
    audit = LogAudit(channel.peer, head)
    tree, leaves, keys = Tree(), set[bytes](), defaultdict[str, set[bytes]](set)
    kinds = Counter[str]()
    trusted = place.tls.all_authorities()
    while len(tree) < head.size:
        request = wire.LogEntriesRequest(first=len(tree), count=min(_PER_PAGE, head.size - len(tree)))
        page = await _page(channel, stub, request)
        for entry in page:
            leaf = entry_leaf(entry.kind, entry.statement)
            tree.append(leaf)
            leaves.add(leaf)
            kinds[entry.kind] += 1
            audit.problems += _of_entry(len(tree) - 1, entry, trusted, keys)
        if not page:
            audit.problems.append(f"{channel.peer} gives {len(tree)} of the {head.size} entries of its head")
            break
        told(f"{len(tree)} of {head.size} entries")
    audit.kinds = dict(sorted(kinds.items()))
    audit.several_keys = {name: len(held) for name, held in sorted(keys.items()) if len(held) > 1}
    if len(tree) == head.size and tree.root() != head.root:
        audit.problems.append(
            f"the entries of {channel.peer} do not have the root that its head of {head.size} entries says"
        )
    kept = [await asyncio.to_thread(kept_in, state) for state in place.states]
    if place.cos is not None:
        kept.append(await _of_cos(place, place.cos))
    _compare(audit, place, tree, frozenset(leaves), kept)
    return audit


async def _page(channel: Channel, stub: Any, request: wire.LogEntriesRequest) -> list[wire.LogEntry]:
    response: wire.LogEntriesResponse = await _call(channel, lambda: stub.LogEntries(request))
    return list(response.entries)


def _compare(
    audit: LogAudit, place: Place, tree: Tree, leaves: frozenset[bytes], kept: Sequence[Kept]
) -> None:
    heads = [(audit.thirdparty, audit.head)]
    for one in kept:
        signed = _signed(one, place.directory_key, audit.problems)
        audit.compared += len(signed)
        heads += [(one.where, head) for head in signed]
        for head in signed:
            if head.size > len(tree):
                audit.problems.append(
                    f"{one.where}: a head of {head.size} entries, and {audit.thirdparty} has {len(tree)}"
                )
            elif tree.root(head.size) != head.root:
                audit.problems.append(
                    f"{one.where}: a head of {head.size} entries of another log than {audit.thirdparty} shows here"
                )
        if one.evidence is None:
            continue
        sizes = [head.size for head in one.evidence.heads]
        roots = [tree.root(size) for size in sizes] if max(sizes) <= len(tree) else None
        audit.problems += _of_evidence(one, place.directory_key, roots, leaves)
    audit.problems += [text for text in _contradictions(heads) if text not in audit.problems]


def _signed(kept: Kept, directory_key: bytes, problems: list[str]) -> list[SignedHead]:
    found = []
    for head in kept.heads:
        try:
            head.verify(directory_key)
        except VerificationError as error:
            problems.append(f"{kept.where}: {error.message}")
        else:
            found.append(head)
    return found


def _contradictions(heads: Sequence[tuple[str, SignedHead]]) -> list[str]:
    found = []
    for number, (where, one) in enumerate(heads):
        for other_where, other in heads[number + 1 :]:
            if (finding := contradiction(one, other)) is not None:
                found.append(
                    f"{where} and {other_where}: heads of {one.size} and {other.size} entries: {finding}"
                )
    return found


def _of_evidence(
    kept: Kept,
    directory_key: bytes,
    roots: Sequence[bytes] | None = None,
    leaves: frozenset[bytes] = frozenset(),
) -> list[str]:
    """Return what a party's evidence says of the third party; nothing when the log explains it."""
    evidence = kept.evidence
    if evidence is None:
        return []
    try:
        if evidence.convicts(directory_key):
            return [f"{kept.where}: evidence, proven by its signatures: {evidence.text()}"]
    except VerificationError as error:
        return [f"{kept.where}: evidence that does not verify: {error.message}"]
    if roots is not None and evidence.refuted_by(roots, leaves):
        return []
    return [f"{kept.where}: evidence: {evidence.text()}"]


def _of_entry(position: int, entry: wire.LogEntry, trusted: bytes, keys: dict[str, set[bytes]]) -> list[str]:
    """Return what is wrong with an entry; note the key that a certificate is for."""
    if entry.kind == CERTIFICATE:
        try:
            certificate = x509.load_der_x509_certificate(entry.statement)
            issuer_of(certificate, trusted)
            pem = certificate.public_bytes(serialization.Encoding.PEM)
            key = certificate.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            keys[str(PeerIdentity.from_certificate(pem))].add(key)
        except (ValueError, TypeError, CertificateError):
            return [f"entry {position} is no certificate of the authority"]
    elif entry.kind in _LABELS and not entry.statement.startswith(_LABELS[entry.kind]):
        return [f"entry {position} is no statement of the kind {entry.kind!r}"]
    return []


async def _of_cos(place: Place, peer: Peer) -> Kept:
    channel = _open(place, "cos", peer)
    stub: Any = channel.stub(LogGossipStub)
    try:
        response = await _call(channel, lambda: stub.CompareHeads(wire.CompareHeadsRequest()))
    finally:
        await channel.close()
    return Kept(channel.peer, [head_from_wire(message) for message in response.heads])


def _open(place: Place, role: str, peer: Peer) -> Channel:
    return connect(
        peer.address,
        place.tls.channel_credentials(),
        tls_name=logical_name(role, peer.name),
        peer=f"{role}/{peer.name}",
        meter=Meter(),
    )


async def _call(channel: Channel, attempt: Callable[[], Awaitable[T]]) -> T:
    try:
        return await Retry(limit_s=_RETRY_S)(attempt)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, channel.peer) from error
