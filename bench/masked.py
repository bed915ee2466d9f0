"""Compare the masked sum with SecAgg+ of flwr: masks, a member's round, the server's unmasking.

Theirs runs in ``.venv-peers`` (``make peers``), as a child process that measures its own CPU time; without it the rows
have no ratio.  Both are measured in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.rows import Ask, Row, cpu_seconds, in_turn, lower
from coterie.crypto import masking, shamir
from coterie.crypto.identity import Bundle, Identity, countersign
from coterie.crypto.masking import Keystream, add_masks
from coterie.crypto.verified import HostRound, Verified
from coterie.secure_sum import masked, masked_member
from coterie.secure_sum.chains import Chains
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.graph import graph_fields
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import ClosedSteps, Step

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_SIZE = 65_536
_STRICT = 3
"""Number of members that check every signature themselves; others share a memory of checked signatures."""
_FEDNEUMF = 44_824
"""Number of values of an update of FedNeuMF on MovieLens 100K."""
_TERMS = ("keys", "signatures", "shares", "masks", "hashes", "messages")


class _Account:
    """Context that counts the CPU seconds of watched calls, by term; nested calls count to the outer one."""

    def __init__(self, watched: Sequence[tuple[object, str, str]]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._watched = watched
        self._inside = False

    def __enter__(self) -> Self:
        self._patches = ExitStack()
        for owner, name, term in self._watched:
            timed = self._timed(getattr(owner, name), term)
            self._patches.enter_context(mock.patch.object(owner, name, timed))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()

    def _timed(self, work: Callable[..., Any], term: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if self._inside:
                return work(*given, **named)
            self._inside = True
            before = time.process_time()
            try:
                return work(*given, **named)
            finally:
                self.seconds[term] += time.process_time() - before
                self._inside = False

        return timed


def _know_nobody(_host: HostRound, _public: bytes) -> None:
    """Replace ``HostRound.have`` by a no-op, so that members share no key agreements."""


def _all_terms() -> _Account:
    """Return an account of all work but the reading and writing of messages."""
    watched: list[tuple[object, str, str]] = [
        (masking.RoundKey, "__init__", "keys"),
        (masking.RoundKey, "agree", "keys"),
        (Identity, "sign", "signatures"),
        (Verified, "bundle", "signatures"),
        (Verified, "signature", "signatures"),
        (shamir, "split", "shares"),
        (shamir, "reconstruct", "shares"),
        (masking, "add_masks", "masks"),
    ]
    for term, names in (
        ("keys", ("share_keys", "pair_mask_key", "own_mask_key", "public_of", "require_usable")),
        ("shares", ("seal_share", "open_share", "share_from_bytes", "share_to_bytes")),
        ("hashes", ("seed_hash",)),
    ):
        watched += [(masking, name, term) for name in names]
    for half in (masked, masked_member):
        watched += [(half, name, "hashes") for name in ("codes_hash", "list_hash")]
    return _Account(watched)


class _Peer:
    """SecAgg+ of flwr in a child process; without ``.venv-peers`` there is none."""

    def __init__(self) -> None:
        self.version = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if _PYTHON.exists():
            self._process = subprocess.Popen(
                [str(_PYTHON), str(Path(__file__).parent / "peers" / "secagg.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.version = self._read()["flwr"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)

    def seconds(self, **asked: object) -> float | None:
        """Return the peer's CPU seconds for a piece of work; None when there is no peer."""
        if self._process is None or self._process.stdin is None:
            return None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, str]:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("there is no peer")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process in .venv-peers ended; make it again with `make peers`")
        found: dict[str, str] = json.loads(line)
        return found


class _People:
    """Enrolled participants, with bundles countersigned by a directory."""

    def __init__(self, count: int) -> None:
        directory = Ed25519PrivateKey.generate()
        self.directory_key = directory.public_key().public_bytes_raw()
        self.now = int(time.time())
        self.identities = [Identity.generate() for _ in range(count)]
        validity = self.now - 60, self.now + 3600
        self.bundles: list[Bundle] = [
            countersign(one.bundle(1, validity), directory, "bench") for one in self.identities
        ]


class _Round:
    """A masked round in this process that keeps each member's CPU time.

    Parameters
    ----------
    people : _People
    hosts : sequence of Verified
        Memory of checked signatures of each member's host.
    dropped : int
        Number of members, the last ones, that drop out after the step SHARE.
    size : int
        Number of values of a contribution.
    number : int
        Number of the round.
    watching : context manager
        Context that is open while members and server work.
    chains : sequence of Chains, optional
        Of each member's host, in a run that has them.
    """

    def __init__(
        self,
        people: _People,
        hosts: Sequence[Verified],
        dropped: int,
        size: int,
        number: int,
        watching: AbstractContextManager[object],
        chains: Sequence[Chains] = (),
    ) -> None:
        layout = Layout((Segment("values", (size,), 1.0, 16),))
        members = len(people.identities)
        server = self.server = MaskedServer(directory_key=people.directory_key)
        plan = self.plan = SumPlan(
            "bench",
            number,
            "train",
            "masked",
            bytes(32),
            layout_hash(layout),
            tuple(Member(one.participant_id, "bench") for one in people.identities),
            *server.plan_fields(members, layout)[:2],
            min_sum=2,
        )
        halves = [
            MaskedMember(
                plan,
                at,
                people.identities[at],
                people.bundles[at],
                people.directory_key,
                people.now,
                hosts[at],
                chains=chains[at] if chains else None,
            )
            for at in range(members)
        ]
        codes = np.random.default_rng(0).integers(1, 2**16, size, dtype=np.uint32)
        self.spent = np.zeros(members)
        self.closed = ClosedSteps()
        self.running = np.zeros(size, np.uint32)
        began = time.process_time()
        with watching:
            for step in server.steps:
                arrived: dict[int, bytes] = {}
                for member in server.expected(plan, self.closed, step):
                    if step is Step.SUBMIT and member >= members - dropped:
                        continue
                    briefing = server.pieces(plan, self.closed, step, member).whole
                    before = time.process_time()
                    message = halves[member].answer(step, briefing, codes if step is Step.SUBMIT else None)
                    self.spent[member] += time.process_time() - before
                    if step is Step.SUBMIT:
                        # In the service, the transport has computed the message's SHA-256.
                        vector = server.vector(
                            plan, self.closed, arrived, member, message, layout, sha256=bytes(32)
                        )
                        self.running += vector.addend
                        arrived[member] = vector.note
                    else:
                        server.check(plan, self.closed, step, member, message)
                        arrived[member] = message
                self.closed = self.closed.with_step(step, arrived)
            total = self.unmask()
        self.seconds = time.process_time() - began
        for half in halves:
            half.forget()
        if not np.array_equal(total, codes * np.uint32(members - dropped)):
            raise AssertionError("the masked sum is wrong")

    def unmask(self) -> np.ndarray:
        """Unmask the sum, as the server does after the last step."""
        return self.server.unmask(self.plan, self.closed, self.running).codes


def member_seconds(members: int, values: int) -> float:
    """Return the median CPU seconds of a member in a masked round without dropouts.

    Another member of the same host has checked the signatures; the member does all else itself.
    """
    people = _People(members)
    alone = mock.patch.object(HostRound, "have", _know_nobody)
    return float(np.median(_Round(people, [Verified()] * members, 0, values, 1, alone).spent[1:]))


def _against(
    ours: Callable[[], float], theirs: Callable[[], float | None], rounds: int
) -> tuple[float, float | None]:
    """Return the medians of two measurements, made in turn."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    known = [their for _, their in pairs if their is not None]
    return statistics.median(own for own, _ in pairs), statistics.median(known) if known else None


def rows(ask: Ask) -> Iterator[Row]:
    """Measure masks, members and the server."""
    with _Peer() as peer:
        beside = f"flwr {peer.version}" if peer.version else "no .venv-peers"
        yield from _mask_rows(ask, peer, beside)
        for members, dropped in ask.size(((20, 2), (100, 10)), ((8, 1),)):
            yield from _round_rows(ask, peer, members, dropped, beside)
    yield from _term_rows(ask)
    yield _chained_row(ask)


def _chained_row(ask: Ask) -> Row:
    """Measure a member that goes along chains with all its neighbours, against one that agrees with them anew."""
    members, size = ask.size((50, _FEDNEUMF), (8, 256))
    people, hosts = _People(members), [Verified()] * members
    chains = [Chains(1000) for _ in range(members)]
    number = 0

    def member(*held: Sequence[Chains]) -> float:
        nonlocal number
        number += 1
        with mock.patch.object(HostRound, "have", _know_nobody):
            return float(np.median(_Round(people, hosts, 0, size, number, nullcontext(), *held).spent[1:]))

    # The first round checks the bundles, and is the one in which they agree.
    member(chains)
    own, anew = _against(lambda: member(chains), member, ask.size(5, 1))
    return lower(
        f"masked.member.{members}.chained",
        own * 1e3,
        anew and anew * 1e3,
        "ms",
        f"rounds.channel_rounds above 0, against 0; {size} values; the row masked.users has the other terms",
    )


def _mask_rows(ask: Ask, peer: _Peer, beside: str) -> Iterator[Row]:
    way = Keystream.fastest()
    for size, name in ask.size(((_SIZE, "64k"), (1 << 20, "1m")), ((256, "256"),)):
        vector = np.zeros(size, np.uint32)

        def ours(vector: np.ndarray = vector) -> float:
            return cpu_seconds(lambda: add_masks(vector, [bytes(32)]))

        ours(), peer.seconds(work="mask", size=size)
        mine, other = _against(ours, lambda size=size: peer.seconds(work="mask", size=size), ask.size(31, 1))  # type: ignore[misc]
        yield lower(
            f"masked.mask.{name}",
            mine / size * 1e9,
            other / size * 1e9 if other else None,
            "ns/value",
            f"one mask; {beside}",
        )
        compiled, reference = in_turn(
            lambda vector=vector: add_masks(vector, [bytes(32)] * 8),  # type: ignore[misc]
            lambda vector=vector: add_masks(vector, [bytes(32)] * 8, way=way),  # type: ignore[misc]
            ask.size(31, 1),
        )
        yield lower(
            f"masked.kernel.{name}",
            compiled / size / 8 * 1e9,
            reference / size / 8 * 1e9,
            "ns/value",
            f"eight masks, as sums compute them; against the reference, AES-256-{way.value.upper()}",
        )


def _round_rows(ask: Ask, peer: _Peer, members: int, dropped: int, beside: str) -> Iterator[Row]:
    whole = members <= 20
    rounds = ask.size(5 if whole else 3, 1)
    size = ask.size(_SIZE, 256)
    people = _People(members)
    through = members - dropped
    strict = slice(through - _STRICT, through)
    played: list[_Round] = []
    asked = {"members": members, "size": size}

    def member() -> float:
        together = Verified()
        hosts = [together] * members
        hosts[strict] = [Verified() for _ in range(_STRICT)]
        # Make a member agree on all its keys itself, as if it were alone on its host.
        alone = mock.patch.object(HostRound, "have", _know_nobody)
        played.append(_Round(people, hosts, dropped, size, len(played) + 1, alone))
        return float(np.median(played[-1].spent[1 : strict.start]))

    threshold = _threshold(members)
    mine, other = _against(member, lambda: peer.seconds(work="client", threshold=threshold, **asked), rounds)
    checking = statistics.median(float(np.median(each.spent[strict])) for each in played) * 1e3
    yield lower(
        f"masked.member.{members}",
        mine * 1e3,
        other * 1e3 if other else None,
        "ms",
        f"{size} values, {dropped} dropped; {beside}; with every signature checked {checking:.3g} ms",
    )
    last = played[-1]
    mine, other = _against(
        lambda: cpu_seconds(last.unmask),
        lambda: peer.seconds(work="unmask", threshold=threshold, dropped=dropped, whole=whole, **asked),
        rounds if whole else ask.size(2, 1),
    )
    how = "" if whole else ", theirs from one secret and mask of each kind times their number"
    yield lower(
        f"masked.unmask.{members}",
        mine * 1e3,
        other * 1e3 if other else None,
        "ms",
        f"{size} values, {dropped} dropped; {beside}{how}",
    )


def _term_rows(ask: Ask, hosts: int = 2) -> Iterator[Row]:
    """Measure a participant's share of a round's CPU time, members and server together, by term."""
    members, rounds, values = ask.size((50, 5, _FEDNEUMF), (4, 1, 256))
    people = _People(members)
    memories = [Verified() for _ in range(hosts)]
    spread = [memories[at * hosts // members] for at in range(members)]
    found: list[dict[str, float]] = []
    for number in range(1, rounds + 2):
        account = _all_terms()
        seconds = _Round(people, spread, 0, values, number, account).seconds
        account.seconds["messages"] = seconds - sum(account.seconds.values())
        found.append(account.seconds)
    where = f"{members} users at {hosts} hosts, {values} values"
    # Leave out the first round, in which hosts check all bundles for the first time.
    medians = {term: statistics.median(one[term] for one in found[1:]) / members * 1e3 for term in _TERMS}
    notes = {
        "keys": "X25519 pairs, agreements, derivations",
        "signatures": "made and checked, by members and server",
        "shares": "dealt, sealed, opened, put together",
        "masks": "expanded and added",
        "hashes": "SHA-256 of contributions and lists, at both ends",
        "messages": "read, compared and written; all else",
    }
    for term in _TERMS:
        yield Row(
            f"masked.users.{members}.{term}", medians[term], None, "CPU ms", None, f"{notes[term]}; {where}"
        )
    yield Row(
        f"masked.users.{members}.all",
        sum(medians.values()),
        None,
        "CPU ms",
        None,
        f"per participant, without transport (round.neumf.users.masked.per_participant has it); {where}",
    )


def _threshold(members: int) -> int:
    return int(graph_fields(members).threshold)
