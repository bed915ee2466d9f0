"""The masked sum against SecAgg+ of flwr in the same run: masks, a member's round, the server's unmasking.

Theirs runs in ``.venv-peers`` (``make peers``), as a child process that measures its own CPU time; without it the rows
have no ratio.  Both are asked in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.rows import Row, cpu_seconds, lower
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.masking import Keystream, add_masks
from coterie.crypto.verified import Verified
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Step
from coterie.wire.layout import Layout, Segment

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_SIZE = 65_536
_STRICT = 3
"""Members that check every signature themselves; the others find it checked by a member before them."""


class _Peer:
    """SecAgg+ of flwr in a process of its own; absent where ``.venv-peers`` is."""

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
        """Return the CPU seconds of a piece of work, or nothing where there is no peer."""
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


class _Round:
    """A round in which every member's CPU time is kept."""

    def __init__(self, members: int, dropped: int, size: int = _SIZE) -> None:
        layout = Layout((Segment("values", (size,), 1.0, 16),))
        directory = Ed25519PrivateKey.generate()
        key = directory.public_key().public_bytes_raw()
        now = int(time.time())
        people = [Identity.generate() for _ in range(members)]
        bundles = [countersign(one.bundle(1, (now - 60, now + 3600)), directory) for one in people]
        self.server = MaskedServer()
        self.plan = SumPlan(
            "bench",
            1,
            "train",
            "masked",
            bytes(32),
            layout_hash(layout),
            tuple(Member(one.participant_id, "bench") for one in people),
            *self.server.plan_fields(members),
            min_sum=2,
        )
        shared = Verified()
        halves = [
            MaskedMember(
                self.plan,
                at,
                people[at],
                bundles[at],
                key,
                now,
                Verified() if at >= members - dropped - _STRICT else shared,
            )
            for at in range(members)
        ]
        codes = np.random.default_rng(0).integers(1, 2**16, size, dtype=np.uint32)
        self.spent = np.zeros(members)
        self.closed: dict[Step, dict[int, bytes]] = {}
        self.running = np.zeros(size, np.uint32)
        for step in Step:
            arrived: dict[int, bytes] = {}
            for member in self.server.expected(self.plan, self.closed, step):
                if step is Step.SUBMIT and member >= members - dropped:
                    continue
                briefing = self.server.briefing(self.plan, self.closed, step, member)
                before = time.process_time()
                message = halves[member].answer(step, briefing, codes if step is Step.SUBMIT else None)
                self.spent[member] += time.process_time() - before
                if step is Step.SUBMIT:
                    vector = self.server.vector(self.plan, self.closed, arrived, member, message, layout)
                    self.running += vector.codes
                    arrived[member] = vector.note
                else:
                    self.server.check(self.plan, self.closed, step, member, message)
                    arrived[member] = message
            self.closed[step] = arrived
        self.through = members - dropped
        if not np.array_equal(self.unmask(), codes * np.uint32(self.through)):
            raise AssertionError("the masked sum is wrong")

    def unmask(self) -> np.ndarray:
        """Do what the server does after the last step."""
        return self.server.unmask(self.plan, self.closed, self.running).codes

    @property
    def member(self) -> float:
        """Median CPU seconds of a member that finds signatures checked."""
        return float(np.median(self.spent[1 : self.through - _STRICT]))

    @property
    def strict(self) -> float:
        """Median CPU seconds of a member that checks every signature."""
        return float(np.median(self.spent[self.through - _STRICT : self.through]))


def _against(
    ours: Callable[[], float], theirs: Callable[[], float | None], rounds: int
) -> tuple[float, float | None]:
    """Return the medians of two measurements that were made in turn."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    known = [their for _, their in pairs if their is not None]
    return statistics.median(own for own, _ in pairs), statistics.median(known) if known else None


def rows() -> Iterator[Row]:
    """Measure masks, members and the server."""
    with _Peer() as peer:
        beside = f"flwr {peer.version}" if peer.version else "no .venv-peers"
        way = Keystream.fastest().value
        yield from _mask_rows(peer, f"{beside}; AES-256-{way.upper()}")
        for members, dropped, target, unmask_target in ((20, 2, 20, 300), (100, 10, 110, 1200)):
            yield from _round_rows(peer, members, dropped, (target, unmask_target), beside)


def _mask_rows(peer: _Peer, beside: str) -> Iterator[Row]:
    for size, name, target in ((_SIZE, "64k", 7), (1 << 20, "1m", 9)):
        vector = np.zeros(size, np.uint32)

        def ours(vector: np.ndarray = vector) -> float:
            return cpu_seconds(lambda: add_masks(vector, [bytes(32)]))

        ours(), peer.seconds(work="mask", size=size)
        mine, other = _against(ours, lambda size=size: peer.seconds(work="mask", size=size), 31)  # type: ignore[misc]
        yield lower(
            f"masked.mask.{name}",
            mine / size * 1e9,
            other / size * 1e9 if other else None,
            "ns/value",
            f"one mask; {beside}; target {target}x, 4.5x without VAES",
        )


def _round_rows(
    peer: _Peer, members: int, dropped: int, targets: tuple[int, int], beside: str
) -> Iterator[Row]:
    whole = members <= 20
    rounds = 5 if whole else 3
    played: list[_Round] = []
    asked = {"members": members, "size": _SIZE}

    def member() -> float:
        played.append(_Round(members, dropped))
        return played[-1].member

    threshold = _threshold(members)
    mine, other = _against(member, lambda: peer.seconds(work="client", threshold=threshold, **asked), rounds)
    strict = statistics.median(each.strict for each in played) * 1e3
    yield lower(
        f"masked.member.{members}",
        mine * 1e3,
        other * 1e3 if other else None,
        "ms",
        f"64k values, {dropped} dropped; {beside}; with every signature checked {strict:.3g} ms; target {targets[0]}x",
    )
    last = played[-1]
    mine, other = _against(
        lambda: cpu_seconds(last.unmask),
        lambda: peer.seconds(work="unmask", threshold=threshold, dropped=dropped, whole=whole, **asked),
        rounds if whole else 2,
    )
    how = "" if whole else ", theirs from one secret and mask of each kind times their number"
    yield lower(
        f"masked.unmask.{members}",
        mine * 1e3,
        other * 1e3 if other else None,
        "ms",
        f"64k values, {dropped} dropped; {beside}{how}; target {targets[1]}x",
    )


def _threshold(members: int) -> int:
    return MaskedServer().plan_fields(members)[1]
