"""A party's watch over the third party's transparency log: it only grows, and has everything that the party relies on.

The watch keeps the newest head that it was shown, in ``log/head.json`` of the state folder, and takes another only when
the two are shown to be of one log.  Other parties' heads reach it through the COS and data owners (`gossip_with`).  Two
logs, or a signed statement that is in none, end the party's work; the signed heads stay in ``log/evidence.json``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import structlog

from coterie.crypto.identity import Bundle
from coterie.crypto.keyfile import write_private_file
from coterie.crypto.merkle import check_consistency, check_inclusion, check_inclusions
from coterie.crypto.transparency import (
    BUNDLE,
    CERTIFICATE,
    Evidence,
    FalseLogError,
    LogBreach,
    SignedHead,
    bundle_statement,
    certificate_statement,
    contradiction,
    entry_leaf,
)
from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError, PeerError, StoreError
from coterie.net.channel import Channel
from coterie.net.log_messages import hashes, head_from_wire, head_to_wire
from coterie.net.rest import Rest
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import log_pb2 as wire
from coterie.wire.v1.log_pb2_grpc import LogGossipStub, TransparencyLogStub

__all__ = ["EVIDENCE", "FOLDER", "HEAD", "HOLD_S", "MOST_HEADS", "LogWatch", "read_evidence", "read_head"]

_log = structlog.get_logger("coterie.log")

T = TypeVar("T")

FOLDER = "log"
"""Folder, within a state folder, of the files below."""
HEAD = "head.json"
EVIDENCE = "evidence.json"

HOLD_S = 20.0
"""Longest time for which a comparison of heads may be held while there is nothing new, seconds."""
MOST_HEADS = 4
"""Most heads in an answer of one party to another."""

_EVERY_S = 30.0
_PAUSES_S = 0.5, 10.0
_AWAY_S = 600.0
"""Time for which the third party may be away before nothing unchecked is relied on, seconds."""
_CALL_S = 10.0
_PER_CALL = 1_000
_MOST_HASHES = 64
"""Most hashes for each leaf of a joint proof: as many as levels."""
_MOST_SHOWN = 1 << 17
_MOST_KEPT = 64


class LogWatch:
    """Follows the third party's log for one process.

    Parameters
    ----------
    channel : Channel
        To the third party.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    state : Path
        State folder of the process.
    chain : callable, optional
        Returns the process's own certificate chain, PEM, which must be logged.
    every_s : float
        Time between two heads that are asked for, seconds.
    clock : callable
        Monotonic seconds.
    rest : Rest, optional
        That of a device which checks in: it follows nothing and compares nothing while it rests.

    Raises
    ------
    StoreError
        A file of the watch is damaged.
    """

    def __init__(
        self,
        channel: Channel,
        directory_key: bytes,
        state: Path,
        chain: Callable[[], bytes] | None = None,
        *,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        rest: Rest | None = None,
    ) -> None:
        # Generated stubs are typed for gRPC's own channel; ours takes and returns the same messages.
        self._stub: Any = channel.stub(TransparencyLogStub)
        self.thirdparty = channel.peer
        """Role and name of the third party."""
        self._directory_key = directory_key
        self._folder = state / FOLDER
        self._chain = chain
        self._every_s = every_s
        self._clock = clock
        self._rest = rest
        self._head, kept = read_head(state)
        self._shown = set(kept)
        # Leaves that are kept with the head, so that a restarted party needs no proof of them again.
        self._kept = list(kept)
        evidence = read_evidence(state)
        self._found = None if evidence is None else FalseLogError(evidence)
        # Heads that the third party has yet to show to be of the log, each with when they came.
        self._undecided: dict[SignedHead, float] = {}
        # Further heads that a caught third party signed.
        self._others: list[SignedHead] = []
        self._comparing, self._settling = asyncio.Lock(), asyncio.Lock()
        self._noting = threading.Lock()
        self._noted: dict[bytes, tuple[str, bytes]] = {}
        self._answered = clock()
        # Whether the last attempt to check noted bundles found nobody; what is logged of that, and of the rest.
        self._failing = False
        self._no_head, self._unchecked, self._waiting = (Seldom(_log, clock=clock) for _ in range(3))
        self._changed = asyncio.Event()
        self._peers: list[Channel] = []
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def head(self) -> SignedHead | None:
        """The newest head; None before the first."""
        return self._head

    @property
    def found(self) -> FalseLogError | None:
        """The violation that the third party was caught at; None while it was not."""
        return self._found

    def check(self) -> None:
        """Raise the violation that the third party was caught at, if there is one.

        Raises
        ------
        FalseLogError
        """
        if self._found is not None:
            raise FalseLogError(self._found.evidence) from self._found

    # --- heads -------------------------------------------------------------------------------------------------

    async def refresh(self) -> SignedHead:
        """Ask the third party for its newest head and compare it with that held.

        Raises
        ------
        PeerError
            The third party cannot be reached, or signs no head.
        FalseLogError
            The heads are of two logs.
        """
        self.check()
        return await self.see(await self._ask_head())

    async def see(self, head: SignedHead) -> SignedHead:
        """Compare a verified head, whoever showed it, with the newest held, and hold the larger one.

        Returns
        -------
        SignedHead
            The newest head.

        Raises
        ------
        PeerError
            The third party, which has to show that they are of one log, cannot be reached; nothing is decided.
        FalseLogError
            They are of two logs.
        """
        if self._found is not None:
            self._remember(head)
        self.check()
        try:
            newest = await self._see(head)
        except PeerError:
            if len(self._undecided) < MOST_HEADS:
                self._undecided.setdefault(head, self._clock())
            raise
        self._undecided.pop(head, None)
        return newest

    async def _see(self, head: SignedHead) -> SignedHead:
        async with self._comparing:
            held = self._head
            if held is None:
                return await self._hold(head)
            finding = contradiction(held, head)
            if finding is not None:
                self._caught(Evidence.of(self.thirdparty, finding, held, head))
            if held.size == head.size:
                if head.time_ms > held.time_ms:
                    self._head = head
                return self._head or head
            await self._show_growth(*((held, head) if held.size < head.size else (head, held)))
            return await self._hold(head) if head.size > held.size else held

    def beside(self, head: SignedHead | None) -> list[SignedHead]:
        """Return heads for a party that was shown ``head``: contradicting ones, or the newest if it is another."""
        if self._found is not None:
            shown = [*self._others, *self._found.evidence.heads]
            return [one for one in dict.fromkeys(shown) if one != head][:MOST_HEADS]
        newest = self._head
        if newest is None or (head is not None and (head.size, head.root) == (newest.size, newest.root)):
            return []
        return [newest]

    async def changed(self) -> None:
        """Wait until there is another newest head, or the third party was caught."""
        await self._changed.wait()

    async def _ask_head(self) -> SignedHead:
        response = await self._call(lambda: self._stub.LogHead(wire.LogHeadRequest(), timeout=_CALL_S))
        head = head_from_wire(response.head)
        try:
            head.verify(self._directory_key)
        except VerificationError as error:
            raise PeerError(f"{self.thirdparty}: {error.message}") from error
        return head

    async def _show_growth(self, smaller: SignedHead, larger: SignedHead) -> None:
        request = wire.LogConsistencyRequest(first=smaller.size, second=larger.size)
        try:
            if smaller.size:
                response = await self._call(lambda: self._stub.LogConsistency(request, timeout=_CALL_S))
                path = hashes(response.path)
            else:
                path = []
            check_consistency(smaller.size, smaller.root, larger.size, larger.root, path)
        except Refusal as refusal:
            if refusal.reason != ErrorReason.ERROR_REASON_INVALID_FIELD:
                raise
            # It says that it does not have so many entries, although it signed a head with them.
            self._caught(await self._inconsistent(smaller, larger))
        except VerificationError:
            self._caught(await self._inconsistent(smaller, larger))

    async def _inconsistent(self, smaller: SignedHead, larger: SignedHead) -> Evidence:
        """Return the evidence in two heads that are not shown to be of one log, or in a third that contradicts one."""
        with contextlib.suppress(PeerError):
            fresh = await self._ask_head()
            self._remember(fresh)
            for head in (larger, smaller):
                finding = contradiction(fresh, head)
                if finding is not None:
                    return Evidence.of(self.thirdparty, finding, fresh, head)
        return Evidence.of(self.thirdparty, LogBreach.NOT_CONSISTENT, smaller, larger)

    def _remember(self, head: SignedHead) -> None:
        """Keep a head for other parties, which find the contradiction in it by themselves."""
        if head not in self._others:
            self._others = [head, *self._others][: MOST_HEADS - 2]
            self._wake()

    async def _hold(self, head: SignedHead) -> SignedHead:
        self._head = head
        self._wake()
        await self._keep()
        return head

    async def _keep(self) -> None:
        head = self._head
        if head is None:
            return
        content = {"head": head.to_json(), "shown": [leaf.hex() for leaf in self._kept]}
        await asyncio.to_thread(self._write, HEAD, json.dumps(content, indent=1).encode())

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            write_private_file(self._folder / name, content)
        except (CertificateError, OSError) as error:
            # On a full volume the watch goes on from memory.
            _log.warning("a file of the log is not kept", file=name, error=str(error))

    def _caught(self, evidence: Evidence) -> NoReturn:
        error = FalseLogError(evidence)
        if self._found is None:
            # At once and before anybody knows: whoever finds the third party caught ends this process's work, and a
            # write in another thread would be cancelled with it.
            self._write(EVIDENCE, evidence.to_json())
            self._found = error
            _log.error(
                "the third party is caught",
                thirdparty=self.thirdparty,
                finding=evidence.finding,
                sizes=[head.size for head in evidence.heads],
                message=evidence.text(),
            )
        self._wake()
        raise error

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- entries -----------------------------------------------------------------------------------------------

    async def require(self, kind: str, statements: Iterable[bytes], *, keep: bool = False) -> None:
        """Require that statements, which the third party signed, are in its log.

        Parameters
        ----------
        kind : str
        statements : iterable of bytes
        keep : bool
            Whether to remember on disk that they are, for a few statements that hold for the whole run.

        Raises
        ------
        PeerError
            The third party cannot be reached.
        FalseLogError
            One of them is not there, or the log is another than before.
        """
        wanted = {entry_leaf(kind, one): (kind, one) for one in statements}
        await self._require(wanted)
        if keep:
            fresh = [leaf for leaf in wanted if leaf not in self._kept]
            if fresh:
                self._kept = [*self._kept, *fresh][-_MOST_KEPT:]
                await self._keep()

    async def among(self, leaves: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of some leaves that are shown to be in the log; nothing follows for the others.

        Many entries that were logged together take one proof of a few hashes.

        Parameters
        ----------
        leaves : sequence of bytes
            As `coterie.crypto.transparency.entry_leaf` returns them, each once.

        Raises
        ------
        PeerError
            The third party cannot be reached.
        FalseLogError
            The log is another than before.
        """
        self.check()
        head = self._head or await self.refresh()
        absent = await self._absent(head, leaves, joint=True)
        if absent:
            head = await self.refresh()
            absent = await self._absent(head, absent, joint=True)
        return frozenset(leaves) - frozenset(absent)

    async def require_patiently(self, kind: str, statements: Sequence[bytes]) -> None:
        """Require and remember statements as `require` does; wait for a third party that cannot be reached.

        Raises
        ------
        FalseLogError
        """
        first, longest = _PAUSES_S
        pause = first
        while True:
            try:
                await self.require(kind, statements, keep=True)
                self._waiting.over("the third party's log answers", peer=self.thirdparty)
                return
            except PeerError as error:
                self._waiting.warning(
                    "waiting for the third party's log",
                    peer=self.thirdparty,
                    kind=kind,
                    error=error.message,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def ready(self) -> None:
        """Wait until the log is shown to have this process's own certificate.

        Raises
        ------
        FalseLogError
        """
        self.check()
        if self._chain is not None:
            await self.require_patiently(CERTIFICATE, [certificate_statement(self._chain())])

    def note(self, bundle: Bundle) -> None:
        """Take note of a verified bundle that is relied on; `settled` has it checked.  Any thread may call this."""
        statement = bundle_statement(bundle)
        leaf = entry_leaf(BUNDLE, statement)
        if leaf not in self._shown:
            with self._noting:
                self._noted[leaf] = (BUNDLE, statement)

    async def settled(self) -> None:
        """Wait until all bundles noted so far are shown to be in the log, before anything leaves that relies on them.

        While the third party is away for less than ten minutes, they are checked later: the first call waits for it,
        later ones return at once until `run` has found it.  Nothing leaves either while another party's head could not
        be compared for as long: a third party that shows two logs could put it off.

        Raises
        ------
        FalseLogError
        """
        self.check()
        pause = _PAUSES_S[0]
        async with self._settling:
            while self._noted or self._put_off_s() >= _AWAY_S:
                if self._failing and self._away_s() < _AWAY_S:
                    return
                try:
                    await self._decide()
                    await self._settle()
                except PeerError as error:
                    self._failing, away_s = True, self._away_s()
                    self._unchecked.warning(
                        "bundles are not checked yet",
                        peer=self.thirdparty,
                        error=error.message,
                        away_s=round(away_s),
                    )
                    if away_s < _AWAY_S:
                        return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _PAUSES_S[1])

    def _away_s(self) -> float:
        """Return for how long the third party has shown nothing that was asked for, seconds."""
        return max(self._clock() - self._answered, self._put_off_s())

    def _put_off_s(self) -> float:
        """Return for how long a head could not be compared, seconds."""
        return self._clock() - min(self._undecided.values(), default=self._clock())

    async def _decide(self) -> None:
        """Compare heads again that could not be compared yet."""
        for head in list(self._undecided):
            await self.see(head)

    async def _settle(self) -> None:
        with self._noting:
            noted, self._noted = self._noted, {}
        try:
            await self._require(noted)
        except PeerError:
            with self._noting:
                self._noted = noted | self._noted
            raise

    async def _require(self, wanted: dict[bytes, tuple[str, bytes]]) -> None:
        self.check()
        left = {leaf: of for leaf, of in wanted.items() if leaf not in self._shown}
        if not left:
            return
        head = self._head or await self.refresh()
        absent = await self._absent(head, list(left))
        if absent:
            # Signed after the head that is held, perhaps; never after one that is asked for now.
            head = await self.refresh()
            absent = await self._absent(head, absent)
        if len(self._shown) + len(left) > _MOST_SHOWN:
            self._shown = set(self._kept)
        self._shown |= left.keys() - set(absent)
        for leaf in absent:
            kind, statement = left[leaf]
            self._caught(
                Evidence(self.thirdparty, LogBreach.NOT_LOGGED, (head,), kind=kind, statement=statement)
            )

    async def _absent(self, head: SignedHead, leaves: Sequence[bytes], *, joint: bool = False) -> list[bytes]:
        """Return the leaves that are not shown to be in the tree of a head."""
        absent: list[bytes] = []
        for first in range(0, len(leaves), _PER_CALL):
            part = leaves[first : first + _PER_CALL]
            request = wire.LogInclusionRequest(leaves=part, size=head.size, joint=joint)
            try:
                response = await self._prove(request)
            except Refusal as refusal:
                if refusal.reason != ErrorReason.ERROR_REASON_INVALID_FIELD:
                    raise
                # The log is smaller than its own head says: the next head will show it.
                absent += part
                continue
            if response.positions:
                absent += await asyncio.to_thread(_not_shown_together, head, part, response)
            else:
                absent += await asyncio.to_thread(_not_shown, head, part, list(response.proofs))
        return absent

    async def _prove(self, request: wire.LogInclusionRequest) -> wire.LogInclusionResponse:
        response: wire.LogInclusionResponse = await self._call(
            lambda: self._stub.LogInclusion(request, timeout=_CALL_S)
        )
        return response

    async def _call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            found = await Retry(limit_s=_CALL_S)(attempt)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.thirdparty) from error
        self._answered, self._failing = self._clock(), False
        return found

    # --- following ---------------------------------------------------------------------------------------------

    def gossip_with(self, channel: Channel) -> None:
        """Compare heads with another party, the COS or a data owner, from now on."""
        self._peers.append(channel)
        if self._tasks is not None:
            self._tasks.create_task(self._gossip(channel))

    async def run(self) -> None:
        """Follow the log, and compare heads with other parties, until cancelled.

        Raises
        ------
        FalseLogError
            The third party was caught.
        """
        self.check()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for channel in self._peers:
                    tasks.create_task(self._gossip(channel))
                tasks.create_task(self._alarm())
                while True:
                    await self._rested()
                    await self._follow()
                    await asyncio.sleep(random.uniform(self._every_s / 2, self._every_s))  # noqa: S311 - jitter
        except* FalseLogError:
            self.check()
        finally:
            self._tasks = None

    async def _rested(self) -> None:
        if self._rest is not None:
            await self._rest.over()

    async def _follow(self) -> None:
        try:
            await self.refresh()
            await self._decide()
            if self._chain is not None:
                await self.require(CERTIFICATE, [certificate_statement(self._chain())], keep=True)
            self._failing = False
            await self.settled()
        except PeerError as error:
            self._no_head.warning(
                "no head of the third party's log", peer=self.thirdparty, error=error.message
            )
        else:
            self._no_head.over("the third party's log again", peer=self.thirdparty)

    async def _alarm(self) -> None:
        while self._found is None:
            await self.changed()
        self.check()

    async def _gossip(self, channel: Channel) -> None:
        stub: Any = channel.stub(LogGossipStub)
        first, longest = _PAUSES_S
        pause = first
        # A device that checks in holds no call.
        hold_s = HOLD_S if self._rest is None else 0.0
        while True:
            await self._rested()
            sent, asked = self._head, self._clock()
            request = wire.CompareHeadsRequest(
                head=None if sent is None else head_to_wire(sent), hold_ms=int(hold_s * 1000)
            )
            try:
                response = await self._unless_grown(
                    sent, stub.CompareHeads(request, timeout=HOLD_S + _CALL_S)
                )
                for message in response.heads[:MOST_HEADS]:
                    await self._hear(head_from_wire(message), channel.peer)
            except grpc.aio.AioRpcError as error:
                _log.debug("no heads from a party", party=channel.peer, error=str(error.code()))
            except PeerError as error:
                _log.warning("a head of the log is not compared yet", party=channel.peer, error=error.message)
            else:
                grown = self._head is not None and (sent is None or self._head.size > sent.size)
                # A party that answers at once with nothing new is not asked again at once.
                if grown or self._clock() - asked > longest:
                    pause = first
                    continue
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311 - jitter
            pause = min(2 * pause, longest)

    async def _unless_grown(
        self, sent: SignedHead | None, call: Awaitable[wire.CompareHeadsResponse]
    ) -> wire.CompareHeadsResponse:
        """Return the answer to a comparison; an empty one as soon as there is a newer head than was sent."""
        asking = asyncio.ensure_future(call)
        try:
            while not asking.done():
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({asking, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not asking.done() and self._head != sent:
                    return wire.CompareHeadsResponse()
            return asking.result()
        finally:
            asking.cancel()

    async def _hear(self, head: SignedHead, party: str) -> None:
        try:
            head.verify(self._directory_key)
        except VerificationError as error:
            _log.warning("a party shows a head that nobody signed", party=party, error=error.message)
            return
        await self.see(head)


def _not_shown(
    head: SignedHead, leaves: Sequence[bytes], proofs: Sequence[wire.InclusionProof]
) -> list[bytes]:
    found = set[bytes]()
    for leaf, proof in zip(leaves, proofs, strict=False):
        with contextlib.suppress(VerificationError):
            if proof.found:
                check_inclusion(leaf, proof.index, head.size, hashes(proof.path), head.root)
                found.add(leaf)
    return [leaf for leaf in leaves if leaf not in found]


def _not_shown_together(
    head: SignedHead, leaves: Sequence[bytes], response: wire.LogInclusionResponse
) -> list[bytes]:
    placed = sorted((at - 1, leaf) for at, leaf in zip(response.positions, leaves, strict=False) if at)
    found = [leaf for _, leaf in placed]
    try:
        path = hashes(response.path, _MOST_HASHES * len(leaves))
        check_inclusions(found, [at for at, _ in placed], head.size, path, head.root)
    except VerificationError:
        return list(leaves)
    shown = set(found)
    return [leaf for leaf in leaves if leaf not in shown]


def read_head(state: Path) -> tuple[SignedHead | None, list[bytes]]:
    """Return the newest head that a party with this state folder was shown, and leaves that it was shown in the log.

    Raises
    ------
    StoreError
        The file is damaged.
    """
    path = state / FOLDER / HEAD
    try:
        content = json.loads(path.read_bytes())
        return SignedHead.from_json(content["head"]), [bytes.fromhex(leaf) for leaf in content["shown"]]
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, KeyError, TypeError, VerificationError) as error:
        raise StoreError(f"{path} cannot be read", hint="restore it from a backup") from error


def read_evidence(state: Path) -> Evidence | None:
    """Return the evidence against the third party in a state folder; None without any.

    Raises
    ------
    StoreError
        The file is damaged.
    """
    path = state / FOLDER / EVIDENCE
    try:
        return Evidence.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, VerificationError) as error:
        raise StoreError(f"{path} cannot be read", hint="restore it from a backup") from error
