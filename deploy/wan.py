#!/usr/bin/env python3
"""Emulate a wide-area network: delay arriving packets, drop a share of them, and limit their rate.

Linux's own emulator (netem) is missing from many kernels.  This script asks the kernel to hand it arriving packets
(NFQUEUE), and lets each packet go on when its time has come.  It needs the standard library, and CAP_NET_ADMIN in the
network namespace.

    wan.py --delay 20                           all packets that arrive in this network namespace, but not over loopback
    wan.py --delay 20 --namespace 4711          the same in the namespace of process 4711
    wan.py --delay 20 --between 10.0.0.2 10.0.0.3    packets that this machine forwards between two addresses, both ways

The delay is that of one direction: if two namespaces each delay arriving packets by 20 ms, a round trip between them
takes 40 ms longer.  Packets that leave are not held, because holding them would also fill their sender's socket and
slow the sender.

The emulation lasts until SIGTERM or SIGINT.  The kernel removes the rules when the process ends, however it ends.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import errno
import ipaddress
import os
import random
import select
import shlex
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Conditions", "Emulation", "Path", "WanError", "main"]

_DEFAULT_BUFFER_MS = 300.0
_LONGEST_MS = 10_000.0
_LOOK_S = 1.0
"""Time between two checks that the network is still there, seconds."""


class WanError(Exception):
    """The network cannot be emulated; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of one direction of an emulated network: delay, loss and rate.

    Attributes
    ----------
    delay_s, jitter_s : float
        Mean delay of a packet, and the largest difference from it, drawn uniformly.  Packets keep their order.
    loss : float
        Share of packets that do not arrive, 0 to 1.
    rate : float
        Bits per second of the slowest link; 0 for no limit.
    buffer_s : float
        Longest time that a packet may wait for that link.  A packet that would wait longer is lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    buffer_s: float = _DEFAULT_BUFFER_MS / 1e3

    def __post_init__(self) -> None:
        longest = _LONGEST_MS / 1e3
        ranges = {
            "delay": (0 <= self.delay_s <= longest, "0 to 10000 ms"),
            "jitter": (
                0 <= self.jitter_s <= self.delay_s,
                "0 ms to the delay: nothing arrives before it was sent",
            ),
            "loss": (0 <= self.loss < 1, "0 to below 100 percent"),
            "rate": (self.rate == 0 or 1e4 <= self.rate <= 1e11, "0 for no limit, or 0.01 to 100000 Mbit/s"),
            "buffer": (0 < self.buffer_s <= longest, "above 0, to 10000 ms"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise WanError(f"{name} is out of its range, {expected}")

    @property
    def nothing(self) -> bool:
        """Whether packets pass as if there were no emulation."""
        return not (self.delay_s or self.loss or self.rate)

    def __str__(self) -> str:
        parts = [f"delay {self.delay_s * 1e3:g} ms"]
        if self.jitter_s:
            parts.append(f"jitter {self.jitter_s * 1e3:g} ms")
        if self.loss:
            parts.append(f"loss {self.loss * 100:g} %")
        if self.rate:
            parts.append(f"rate {self.rate / 1e6:g} Mbit/s")
        return ", ".join(parts)


class Path:
    """One direction of a network: computes the arrival of each packet, without sockets and clocks.

    Parameters
    ----------
    conditions : Conditions
        Conditions of this direction.
    draw : random.Random
        Random numbers for losses and delays.
    """

    def __init__(self, conditions: Conditions, draw: random.Random) -> None:
        self._conditions = conditions
        self._draw = draw
        self._free = 0.0
        self._last = 0.0

    def due(self, now: float, length: int) -> float | None:
        """Return the arrival of a packet that is sent now, in seconds of the same clock; None for a lost packet.

        Parameters
        ----------
        now : float
            Time of a clock that only goes forward, seconds.
        length : int
            Length of the packet, bytes.
        """
        how = self._conditions
        if how.loss and self._draw.random() < how.loss:
            return None
        through = now
        if how.rate:
            begins = max(now, self._free)
            if begins - now > how.buffer_s:
                return None
            through = self._free = begins + length * 8 / how.rate
        wait = how.delay_s + (self._draw.uniform(-how.jitter_s, how.jitter_s) if how.jitter_s else 0.0)
        self._last = max(self._last, through + wait)
        return self._last


# --- netlink ---------------------------------------------------------------------------------------------------

_NETLINK_NETFILTER = 12
_SOL_NETLINK, _NO_ENOBUFS = 270, 5
_SO_RCVBUFFORCE = 33
_REQUEST, _ACK, _CREATE = 1, 4, 0x400
_ERROR = 2
_QUEUE_SUBSYSTEM, _NFTABLES = 3, 10
_PACKET, _VERDICT, _CONFIG = 0, 1, 2
_DROP, _ACCEPT = 0, 1
_FAIL_OPEN, _WHOLE_SEGMENTS = 1, 4
_LOCAL_IN, _FORWARD = 1, 2
_COPIED_BYTES = 40


def _attribute(kind: int, payload: bytes) -> bytes:
    size = 4 + len(payload)
    return struct.pack("=HH", size, kind) + payload + bytes(-size % 4)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | 0x8000, b"".join(attributes))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _message(subsystem: int, kind: int, flags: int, family: int, resource: int, body: bytes = b"") -> bytes:
    head = struct.pack("=BB", family, 0) + struct.pack(">H", resource)
    return struct.pack("=IHHII", 20 + len(body), subsystem << 8 | kind, _REQUEST | flags, 0, 0) + head + body


def _attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield kind, begin and end of each attribute."""
    while start + 4 <= end:
        size, kind = struct.unpack_from("=HH", data, start)
        if size < 4:
            return
        yield kind & 0x3FFF, start + 4, start + size
        start += (size + 3) & ~3


class _Netlink:
    """A socket to the kernel's packet filter."""

    def __init__(self) -> None:
        try:
            self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        except OSError as error:
            raise WanError("this kernel has no packet filter (CONFIG_NETFILTER_NETLINK)") from error
        self.socket.bind((0, 0))

    def ask(self, message: bytes, answers: int = 1) -> int:
        """Send messages, wait for the answer to each, and return the first error; 0 without an error."""
        self.socket.send(message)
        first, heard = 0, 0
        self.socket.settimeout(5)
        while heard < answers and not first:
            data = self.socket.recv(1 << 16)
            start = 0
            while start + 20 <= len(data):
                size, kind = struct.unpack_from("=IH", data, start)
                if kind == _ERROR:
                    heard += 1
                    first = first or -struct.unpack_from("=i", data, start + 16)[0]
                start += (size + 3) & ~3
        return first


def _require(error: int, what: str, missing: str) -> None:
    if error in (errno.EPERM, errno.EACCES):
        # The kernel gives the same error for a queue that another program has.
        raise WanError(
            f"may not {what}: be root, or have CAP_NET_ADMIN in the network namespace; and where another program has "
            "this queue, --queue names another"
        )
    if error in (errno.ENOENT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL):
        raise WanError(f"cannot {what}: this kernel lacks {missing}")
    if error:
        raise WanError(f"cannot {what}: {os.strerror(error)}")


# --- rules: which packets are handed over ----------------------------------------------------------------------


def _expression(name: str, *attributes: bytes) -> bytes:
    return _nested(1, _text(1, name), _nested(2, *attributes))


def _equals(value: bytes, *, not_: bool = False) -> bytes:
    return _expression("cmp", _number(1, 1), _number(2, int(not_)), _nested(3, _attribute(1, value)))


def _not_loopback() -> bytes:
    # Loopback is the first interface of every network namespace.
    return _expression("meta", _number(2, 4), _number(1, 1)) + _equals(struct.pack("=I", 1), not_=True)


def _address(address: bytes, *, source: bool) -> bytes:
    four = len(address) == 4
    offset = (12 if source else 16) if four else (8 if source else 24)
    load = _expression("payload", _number(1, 1), _number(2, 1), _number(3, offset), _number(4, len(address)))
    return load + _equals(address)


def _hand_over(queue: int, *, native: bool) -> bytes:
    """Return the expression that hands a packet to a queue, and lets it pass if no program reads the queue."""
    if native:
        numbers = [_attribute(kind, struct.pack(">H", value)) for kind, value in ((1, queue), (2, 1), (3, 1))]
        return _expression("queue", *numbers)
    # Kernels without nft_queue have the same as a target of the older filter.
    information = struct.pack("=HHHxx", queue, 1, 1)
    return _expression("target", _text(1, "NFQUEUE"), _number(2, 3), _attribute(3, information))


@dataclass(frozen=True)
class _Rule:
    family: int
    hook: int
    queue: int
    which: bytes


class _Rules(_Netlink):
    """Tables of the packet filter that belong to this socket; they end with the socket or its process."""

    @classmethod
    def installed(cls, name: str, rules: list[_Rule]) -> _Rules:
        """Install the rules, and return them."""
        error = 0
        for native in (True, False):
            made = cls()
            error = made._install(name, rules, native=native)
            if not error:
                return made
            made.socket.close()
            if error != errno.ENOENT:
                break
        missing = "nf_tables with NFQUEUE (nft_queue, or xt_NFQUEUE with nft_compat)"
        _require(error, "have packets handed over", missing)
        raise AssertionError("unreachable")

    def _install(self, name: str, rules: list[_Rule], *, native: bool) -> int:
        messages = []
        owner = 2
        for family in sorted({rule.family for rule in rules}):
            messages.append(self._new(0, family, _text(1, name) + _number(2, owner)))
            for hook in sorted({rule.hook for rule in rules if rule.family == family}):
                place = _nested(4, _number(1, hook), _attribute(2, struct.pack(">i", -150)))
                messages.append(
                    self._new(
                        3, family, _text(1, name) + _text(3, f"hook{hook}") + place + _text(7, "filter")
                    )
                )
        for rule in rules:
            expressions = rule.which + _hand_over(rule.queue, native=native)
            body = _text(1, name) + _text(2, f"hook{rule.hook}") + _nested(4, expressions)
            messages.append(self._new(6, rule.family, body, 0x800))
        # One batch: the kernel installs all of the rules or none.
        begin = _message(0, 0x10, 0, 0, _NFTABLES)
        end = _message(0, 0x11, 0, 0, _NFTABLES)
        return self.ask(begin + b"".join(messages) + end, len(messages))

    @staticmethod
    def _new(kind: int, family: int, body: bytes, flags: int = 0) -> bytes:
        return _message(_NFTABLES, kind, _CREATE | _ACK | flags, family, 0, body)


# --- packets ---------------------------------------------------------------------------------------------------


class _Queues(_Netlink):
    """Queues of packets that the kernel hands over and holds until it gets a verdict on each."""

    def __init__(self, numbers: list[int], *, whole: bool) -> None:
        super().__init__()
        self.socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
        for number in numbers:
            # Without this flag the kernel splits segments as the network card would, and hands over each frame alone.
            flags = struct.pack(">I", _FAIL_OPEN | (_WHOLE_SEGMENTS if whole else 0))
            mask = struct.pack(">I", _FAIL_OPEN | _WHOLE_SEGMENTS)
            for attributes in (
                _attribute(1, struct.pack(">BxH", 1, 0)),
                _attribute(2, struct.pack(">IB", _COPIED_BYTES, 2)),
                _attribute(3, struct.pack(">I", 1 << 16)),
                _attribute(4, mask) + _attribute(5, flags),
            ):
                error = self.ask(_message(_QUEUE_SUBSYSTEM, _CONFIG, _ACK, 0, number, attributes))
                _require(error, "take packets", "NFQUEUE (CONFIG_NETFILTER_NETLINK_QUEUE)")
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 16 << 20)
        except PermissionError:
            # In a container the larger buffer needs CAP_NET_ADMIN of the machine itself.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.setblocking(False)

    def arrived(self) -> Iterator[tuple[int, int, int]]:
        """Yield queue, id and length of each packet that is there now."""
        for _ in range(64):
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            start = 0
            while start + 20 <= len(data):
                size, kind = struct.unpack_from("=IH", data, start)
                if kind == _QUEUE_SUBSYSTEM << 8 | _PACKET:
                    (queue,) = struct.unpack_from(">H", data, start + 18)
                    identity = length = 0
                    for name, begin, end in _attributes(data, start + 20, start + size):
                        if name == 1:
                            (identity,) = struct.unpack_from(">I", data, begin)
                        elif name == 10 and not length:
                            length = end - begin
                        elif name == 13:
                            (length,) = struct.unpack_from(">I", data, begin)
                    yield queue, identity, length
                start += (size + 3) & ~3

    def decide(self, queue: int, identity: int, verdict: int) -> None:
        """Give the kernel the verdict on a packet: let it go on, or drop it."""
        body = _attribute(2, struct.pack(">II", verdict, identity))
        self.socket.send(_message(_QUEUE_SUBSYSTEM, _VERDICT, 0, 0, queue, body))


class Emulation:
    """An emulated network, in the network namespace of this process.

    Parameters
    ----------
    conditions : Conditions
        Conditions of each direction.
    between : sequence of (str, str)
        Pairs of addresses between which this machine forwards packets.  If empty, all packets that arrive in this
        namespace are held.
    loopback : bool
        Whether packets that arrive over loopback are held as well.
    queue : int
        Number of the first queue; each direction of each pair has one.
    seed : int, optional
        Seed of losses and delays.

    Raises
    ------
    WanError
        Rights, or the kernel's filter or queues, are missing, or an address is not valid.
    """

    def __init__(
        self,
        conditions: Conditions,
        between: list[tuple[str, str]],
        *,
        loopback: bool = False,
        queue: int = 40,
        seed: int | None = None,
    ) -> None:
        rules = _rules(between, queue, loopback=loopback)
        numbers = sorted({rule.queue for rule in rules})
        if numbers[-1] > 0xFFFF:
            raise WanError(f"queue {numbers[-1]} is out of its range, 0 to 65535")
        draw = random.Random(seed)  # noqa: S311 - a network, not a secret
        self._paths = {number: Path(conditions, draw) for number in numbers}
        self._queues = _Queues(numbers, whole=not (conditions.loss or conditions.rate))
        self._rules = _Rules.installed(f"coterie-wan-{queue}", rules)
        # Packets keep their order on a path, so the first one in its queue is always due first.
        self._waiting: dict[int, collections.deque[tuple[float, int]]] = {
            number: collections.deque() for number in numbers
        }
        self.passed = self.lost = 0

    def run(self, stop: socket.socket) -> None:
        """Emulate until ``stop`` has something to read; then let all waiting packets go on.

        Raises
        ------
        WanError
            All interfaces but loopback are gone, because the container that had the network has ended.
        """
        watched = [self._queues.socket, stop]
        connected, looked = len(socket.if_nameindex()) > 1, time.monotonic()
        while True:
            ready, _, _ = select.select(watched, [], [], min(self._pause(), _LOOK_S))
            if connected and time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if len(socket.if_nameindex()) == 1:
                    raise WanError(
                        "the network is gone; where a container was started again, it has another one now"
                    )
            if stop in ready:
                break
            now = time.monotonic()
            for queue, identity, length in self._queues.arrived():
                due = self._paths[queue].due(now, length)
                if due is None:
                    self.lost += 1
                    self._queues.decide(queue, identity, _DROP)
                else:
                    self._waiting[queue].append((due, identity))
            self._release(time.monotonic())
        self._rules.socket.close()
        self._release(float("inf"))
        self._queues.socket.close()

    def _pause(self) -> float:
        first = [held[0][0] for held in self._waiting.values() if held]
        return max(0.0, min(first) - time.monotonic()) if first else _LOOK_S

    def _release(self, now: float) -> None:
        for queue, held in self._waiting.items():
            while held and held[0][0] <= now:
                self._queues.decide(queue, held.popleft()[1], _ACCEPT)
                self.passed += 1


def _rules(between: list[tuple[str, str]], queue: int, *, loopback: bool) -> list[_Rule]:
    four, six = 2, 10
    if not between:
        which = b"" if loopback else _not_loopback()
        return [_Rule(family, _LOCAL_IN, queue, which) for family in (four, six)]
    found = []
    for pair in between:
        try:
            one, other = (ipaddress.ip_address(address) for address in pair)
        except ValueError as error:
            raise WanError(f"{error}; expected two addresses such as 10.0.0.2 10.0.0.3") from error
        if one.version != other.version or one == other:
            raise WanError(f"{one} and {other}: expected two addresses of one kind")
        for source, target in ((one, other), (other, one)):
            which = _address(source.packed, source=True) + _address(target.packed, source=False)
            found.append(_Rule(four if one.version == 4 else six, _FORWARD, queue + len(found), which))
    return found


def _enter(namespace: str) -> None:
    """Move this process into a network namespace, given by a process id, a name of `ip netns`, or a file."""
    if namespace.isdigit():
        path = f"/proc/{namespace}/ns/net"
    else:
        path = namespace if "/" in namespace else f"/run/netns/{namespace}"
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise WanError(f"no network namespace {namespace}: {path}: {error.strerror}") from error
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):
            raise WanError(
                f"cannot enter the network namespace {namespace}: {os.strerror(ctypes.get_errno())}"
            )
    finally:
        os.close(handle)


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="wan.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def number(name: str, unit: str, help_: str, default: float = 0.0) -> None:
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar=unit, help=f"{help_} (default: {default:g})"
        )

    number("delay", "MS", "delay of each packet, milliseconds")
    number("jitter", "MS", "largest change of the delay, up or down, milliseconds; packets keep their order")
    number("loss", "PERCENT", "share of packets that do not arrive, percent")
    number("rate", "MBIT", "rate of the slowest link, megabits per second; 0 for no limit")
    number(
        "buffer",
        "MS",
        "longest wait for that link, milliseconds; then the packet is lost",
        _DEFAULT_BUFFER_MS,
    )
    parser.add_argument(
        "--between",
        nargs=2,
        action="append",
        default=[],
        metavar=("A", "B"),
        help="only packets that this machine forwards between two addresses, both ways; may be repeated",
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="also packets that arrive over loopback, for services of one machine in a namespace of their own",
    )
    parser.add_argument(
        "--namespace",
        metavar="WHICH",
        help="network namespace: a process id, a name or a file (default: that of this process)",
    )
    parser.add_argument("--queue", type=int, default=40, metavar="N", help="first queue to use (default: 40)")
    parser.add_argument(
        "--from-environment",
        action="append",
        default=[],
        metavar="NAME",
        help="take the options from this environment variable instead; of several, the first that is not empty",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of losses and delays, to repeat them")
    return parser


def _from_environment(names: list[str]) -> list[str]:
    """Return the options in the first of these environment variables that is not empty."""
    return shlex.split(next((text for name in names if (text := os.environ.get(name, "").strip())), ""))


def main(arguments: list[str] | None = None) -> int:
    """Run the emulation of the command line, and return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.from_environment:
        given = parser.parse_args(_from_environment(given.from_environment))
    stop, stopped = socket.socketpair()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopped.send(b"x"))
    try:
        conditions = Conditions(
            given.delay / 1e3, given.jitter / 1e3, given.loss / 100, given.rate * 1e6, given.buffer / 1e3
        )
        if not 0 <= given.queue <= 0xFFFF:
            raise WanError(f"queue {given.queue} is out of its range, 0 to 65535")
        if conditions.nothing:
            print("nothing to emulate: neither delay, loss nor rate", flush=True)
            stop.recv(1)
            return 0
        if given.namespace is not None:
            _enter(given.namespace)
        emulation = Emulation(
            conditions, given.between, loopback=given.loopback, queue=given.queue, seed=given.seed
        )
        print(f"emulating: {conditions}", flush=True)
        emulation.run(stop)
        print(f"{emulation.passed} packets passed, {emulation.lost} lost", flush=True)
    except WanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
