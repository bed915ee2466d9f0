"""Leaks of a user's items, each to be put into what the parties of a finished run held.

A leak tells the items of the only user of `FEW`, a client host.  It changes recorded messages, pages or files, and
returns those that it changed; everything else is as the run left it.  The audit finds each, unless `unseen` says why it
cannot; docs/threat-model.md lists these in a table.
"""

import base64
import contextlib
import hashlib
import json
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.message import Message

from coterie.privacy.payloads import CarriedPayloads
from coterie.privacy.transcript import TranscriptEntry, decode, message_class
from coterie.wire.chunks import split
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2

from .watched_runs import FEW, ITEMS, Watched

COS, OPERATOR = "cos/cos", "operator/operator"
_FIELD = 1000
"""Number of a field that no message has."""


@dataclass
class Changed:
    """What a leak changed: messages by the party that recorded them, pages by the party that wrote them, files.

    Attributes
    ----------
    messages, before : dict
        Messages with the leak, and the same ones without it, in which nothing may be found.
    """

    messages: dict[str, list[TranscriptEntry]] = field(default_factory=dict)
    before: dict[str, list[TranscriptEntry]] = field(default_factory=dict)
    pages: dict[str, bytes] = field(default_factory=dict)
    files: list[tuple[str, str, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Leak:
    """A leak.

    Attributes
    ----------
    name : str
        The leak in a few words, as the threat model has it.
    put : callable
        Takes a run; returns what it changed, or None where the run has no such message.
    unseen : bool
        Whether the audit cannot see it.
    """

    name: str
    put: Callable[[Watched], Changed | None]
    unseen: bool = False
    only: tuple[str, ...] = ()
    """Systems, forms and sums whose runs have such a message; empty for all."""


# --- the secret in every notation -------------------------------------------------------------------------------------


def numbers(run: Watched) -> list[int]:
    """Return the numbers of the user's items, ascending."""
    return run.numbers[FEW]


def shuffled(run: Watched) -> list[int]:
    """Return the numbers in an order that depends on nothing."""
    own = list(numbers(run))
    random.Random(1).shuffle(own)
    return own


def decimal(run: Watched) -> str:
    """Return the numbers as a text."""
    return "-".join(map(str, shuffled(run)))


def keys(run: Watched, count: int = 2) -> str:
    """Return some of the keys as a text."""
    return " ".join(run.keys[FEW][:count])


def bitmap(run: Watched) -> bytes:
    """Return the bitmap over the catalogue."""
    mask = np.zeros(ITEMS, np.uint8)
    mask[numbers(run)] = 1
    return np.packbits(mask, bitorder="little").tobytes()


def varint(number: int) -> bytes:
    """Return a number as a varint."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


def unknown(content: bytes) -> bytes:
    """Return a field that no message has, with bytes."""
    return varint(_FIELD << 3 | 2) + varint(len(content)) + content


def unknown_numbers(own: list[int]) -> bytes:
    """Return a repeated field that no message has, with numbers."""
    return b"".join(varint(_FIELD << 3) + varint(number) for number in own)


# --- messages -----------------------------------------------------------------------------------------------------


def recorded(
    run: Watched, rpc: str, direction: str, party: str = COS, peer: str = ""
) -> list[TranscriptEntry]:
    """Return the recorded messages of an RPC."""
    return [
        entry
        for entry in run.entries(party)
        if (entry.rpc, entry.direction) == (rpc, direction) and entry.peer.startswith(peer)
    ]


def altered(
    rpc: str,
    change: Callable[[Watched, Any], object],
    direction: str = "received",
    *,
    party: str = COS,
    peer: str = FEW,
) -> Callable[[Watched], Changed | None]:
    """Return a leak that changes the first message of an RPC."""

    def put(run: Watched) -> Changed | None:
        for entry in recorded(run, rpc, direction, party, peer):
            message = decode(entry)
            if change(run, message) is not False:
                told = replace(entry, payload=message.SerializeToString())
                around = fetched_by(run) if rpc == "Submit" else []
                return Changed({party: [*around, told]}, {party: [*around, entry]})
        return None

    return put


def appended(rpc: str, content: Callable[[Watched], bytes]) -> Callable[[Watched], Changed | None]:
    """Return a leak that adds unknown fields to the first message of an RPC."""

    def put(run: Watched) -> Changed | None:
        first = recorded(run, rpc, "received", peer=FEW)[0]
        return Changed({COS: [replace(first, payload=first.payload + content(run))]}, {COS: [first]})

    return put


def one_in_each(rpc: str, change: Callable[[Any, int, str], object]) -> Callable[[Watched], Changed | None]:
    """Return a leak of one item in each of many messages."""

    def put(run: Watched) -> Changed | None:
        first = recorded(run, rpc, "received", peer=FEW)[0]
        found = []
        for number, key in zip(run.numbers[FEW], run.keys[FEW], strict=True):
            message = decode(first)
            change(message, number, key)
            found.append(replace(first, payload=message.SerializeToString()))
        return Changed({COS: found}, {COS: [first]})

    return put


def fetched_by(run: Watched) -> list[TranscriptEntry]:
    """Return how the host fetched the plans of sums, which tell what its contributions are."""
    found, asked = [], False
    for entry in run.entries(COS):
        if (entry.rpc, entry.peer) == ("Fetch", FEW):
            message = decode(entry)
            if isinstance(message, wire.FetchRequest):
                asked = message.kind == wire.FetchKind.FETCH_KIND_SUM_PLAN
            found += [entry] if asked else []
    return found


def submitted(
    change: Callable[[Watched, bytes], bytes | None], kind: int = wire.SubmitKind.SUBMIT_KIND_VECTOR
) -> Callable[[Watched], Changed | None]:
    """Return a leak that changes the payload of a contribution."""

    def put(run: Watched) -> Changed | None:
        requests: list[TranscriptEntry] = []
        payload = bytearray()
        for entry in recorded(run, "Submit", "received", peer=FEW):
            message = decode(entry)
            if message.kind == kind or requests:
                requests.append(entry)
                payload += message.chunk.data
                if message.chunk.last:
                    break
        if not requests or (content := change(run, bytes(payload))) is None:
            return None
        first = decode(requests[0])
        first.chunk.CopyFrom(next(iter(split(content))))
        told, around = replace(requests[0], payload=first.SerializeToString()), fetched_by(run)
        return Changed({COS: [*around, told]}, {COS: [*around, *requests]})

    return put


def fetched(
    kind: int, change: Callable[[Watched, Any], object], cls: type[Message]
) -> Callable[[Watched], Changed | None]:
    """Return a leak that changes what the COS tells another party on its request."""

    def put(run: Watched) -> Changed | None:
        carried, asked = CarriedPayloads(), {}
        for entry in run.entries(COS):
            if message_class(entry) is None or entry.rpc != "Fetch" or entry.peer == FEW:
                continue
            message = decode(entry)
            if isinstance(message, wire.FetchRequest):
                asked[entry.peer] = (entry, message)
            for payload in carried.add(entry, message):
                if isinstance(payload, cls) and asked[entry.peer][1].kind == kind:
                    change(run, payload)
                    answer = wire.FetchResponse(chunk=next(iter(split(payload.SerializeToString()))))
                    told = replace(entry, payload=answer.SerializeToString())
                    return Changed({COS: [asked[entry.peer][0], told]}, {COS: [asked[entry.peer][0], entry]})
        return None

    return put


def in_clear(run: Watched, payload: bytes) -> bytes | None:
    """Return a contribution without its mask or key, an entry of 1 for each of the user's items."""
    if run.running.settings.secure_sum == "clear":
        return None
    codes = np.zeros(ITEMS, "<u4")
    codes[numbers(run)] = 1
    return rounds_pb2.SummedVector(codes=codes.tobytes()).SerializeToString()


def sparse(run: Watched, payload: bytes) -> bytes | None:
    """Return a contribution that says at which items it has something."""
    if run.running.settings.secure_sum not in ("masked", "clear"):
        return None
    return payload + rounds_pb2.SummedVector(places=bitmap(run)).SerializeToString()


def signed_by(content: Callable[[Watched], bytes]) -> Callable[[Watched, bytes], bytes | None]:
    """Return a change of a contribution's signature."""

    def change(run: Watched, payload: bytes) -> bytes | None:
        vector = rounds_pb2.SummedVector.FromString(payload)
        if not vector.signature:
            return None
        vector.signature = content(run).ljust(64, b"\x9c")[:64]
        return bytes(vector.SerializeToString())

    return change


def catalogue_first(run: Watched, catalogue: wire.Catalogue) -> None:
    """Put the user's items first."""
    own = set(run.keys[FEW])
    items = sorted(catalogue.items, key=lambda key: key not in own)
    del catalogue.items[:]
    catalogue.items.extend(items)


def slots(run: Watched, message: Any) -> object:
    """Let a submission cover slots that are the numbers of items."""
    if not message.slots:
        return False
    del message.slots[:]
    for number in shuffled(run):
        message.slots.add(first=number, count=1)
    return None


def named(run: Watched, message: Any, content: str) -> object:
    """Give a participant a name."""
    if not message.participants:
        return False
    message.participants[0].name = content
    return None


def metrics(run: Watched, message: operator.WatchRunResponse, content: str) -> object:
    """Add a metric to an event."""
    if not message.HasField("metrics"):
        return False
    message.metrics.names.append(content)
    return None


def fraction(run: Watched, message: operator.WatchRunResponse) -> object:
    """Hide an item in the last byte of each mean."""
    if not message.HasField("metrics"):
        return False
    for position, number in zip(range(len(message.metrics.means)), numbers(run), strict=False):
        # With 0 nothing could be hidden: it would be another number altogether.
        if mean := message.metrics.means[position]:
            bits = bytes([number]) + np.float64(mean).tobytes()[1:]
            message.metrics.means[position] = float(np.frombuffer(bits, "<f8")[0])
    return None


def in_chunks(run: Watched) -> Changed | None:
    """Cut a payload into chunks as long as the numbers of items."""
    for first in recorded(run, "Submit", "received", peer=FEW):
        message = decode(first)
        data = bytes(message.chunk.data)
        if len(data) > 150 and message.chunk.last:
            found, at = [], 0
            while at < len(data):
                length = numbers(run)[len(found) % len(numbers(run))] or 1
                message.chunk.offset, message.chunk.data = at, data[at : at + length]
                at += length
                message.chunk.last = at >= len(data)
                found.append(replace(first, payload=message.SerializeToString()))
                message = wire.SubmitRequest()
            around = fetched_by(run)
            return Changed({COS: [*around, *found]}, {COS: [*around, first]})
    return None


def at_times(run: Watched) -> Changed:
    """Send messages so many seconds one after the other."""
    first = recorded(run, "Poll", "received", peer=FEW)[0]
    times = np.cumsum(shuffled(run)) * 1_000_000_000
    return Changed({COS: [replace(first, time_ns=first.time_ns + time) for time in times.tolist()]})


# --- pages and files ----------------------------------------------------------------------------------------------


def on_log(
    lines: Callable[[Watched], list[dict[str, object]]], party: str = FEW
) -> Callable[[Watched], Changed]:
    """Return a leak in the log of a party's process."""

    def put(run: Watched) -> Changed:
        own = {"service": party, "level": "info", "timestamp": "2026-01-01T00:00:00Z"}
        more = "".join(json.dumps({**own, **line}) + "\n" for line in lines(run))
        return Changed(pages={party: run.running.children[party].log.read_bytes() + more.encode()})

    return put


def on_page(
    lines: Callable[[Watched], list[str]], path: str = "/metrics", party: str = FEW
) -> Callable[[Watched], Changed]:
    """Return a leak on a page of a party's process."""

    def put(run: Watched) -> Changed:
        return Changed(pages={party: run.pages[party][path] + "\n".join(lines(run)).encode() + b"\n"})

    return put


def on_file(
    name: Callable[[Watched], str], content: Callable[[Watched], bytes], party: str = COS
) -> Callable[[Watched], Changed]:
    """Return a leak in a file of a party."""
    return lambda run: Changed(files=[(party, name(run), content(run))])


def report(run: Watched) -> bytes:
    """Return the run's report with items in it, a number on each line."""
    return json.dumps({**run.report, "items_of": shuffled(run)}, indent=1).encode()


def report_page(run: Watched) -> bytes:
    """Return a page with items in the cells of a table."""
    return ("<table>\n" + "\n".join(f"<tr><td>{n}</td></tr>" for n in shuffled(run)) + "\n</table>").encode()


def stored(*rows: str) -> bytes:
    """Return a store with a text in each row of a table."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE notes (note TEXT)")
        connection.executemany("INSERT INTO notes VALUES (?)", [(row,) for row in rows])
        connection.commit()
        return connection.serialize()


# --- the list -----------------------------------------------------------------------------------------------------

_SUBMITTING = ("shielded", "fedncf", "fedmf", "fcf", "ease", "ials", "fpl", "fedmvmf")

LEAKS = (
    # Fields of messages.
    Leak(
        "two item keys as the name of a participant",
        altered("Register", lambda run, m: named(run, m, keys(run))),
    ),
    Leak(
        "item numbers as the name of a participant",
        altered("Register", lambda run, m: named(run, m, decimal(run))),
    ),
    Leak("anything as the name of a user", altered("Register", lambda run, m: named(run, m, "ant"))),
    Leak(
        "a user's items as items of a data owner",
        altered("Register", lambda run, m: m.items.extend(run.keys[FEW])),
    ),
    Leak(
        "two item keys in hexadecimal as the id of a run",
        altered("Poll", lambda run, m: setattr(m, "run_id", keys(run).encode().hex())),
    ),
    Leak(
        "two item keys in base64 in a certificate request",
        altered(
            "Enrol",
            lambda run, m: setattr(m, "certificate_request", base64.b64encode(keys(run).encode())),
            party="thirdparty/directory",
            peer="",
        ),
    ),
    Leak(
        "item numbers as the name of a party at enrolment",
        altered(
            "Enrol", lambda run, m: setattr(m, "name", decimal(run)), party="thirdparty/directory", peer=""
        ),
    ),
    Leak(
        "item numbers as revisions that a caller holds",
        altered("Poll", lambda run, m: m.attach.extend(shuffled(run))),
    ),
    Leak("item numbers as slots of a submission", altered("Submit", slots), only=_SUBMITTING),
    Leak(
        "an item number in each of many requests",
        one_in_each("Poll", lambda m, number, key: setattr(m, "hold_ms", number)),
    ),
    Leak(
        "an item key in each of many requests",
        one_in_each("Poll", lambda m, number, key: setattr(m, "run_id", key)),
    ),
    Leak("a bitmap in place of a hash", altered("Poll", lambda run, m: m.held_sha256.append(bitmap(run)))),
    Leak(
        "item numbers in words of a refusal",
        altered("Submit", lambda run, m: m.refused.add(message=f"no place for {decimal(run)}"), "sent"),
    ),
    Leak(
        "two item keys in words of a refusal",
        altered("Submit", lambda run, m: m.refused.add(message=keys(run)), "sent"),
    ),
    # Fields that no message has.
    Leak(
        "text with item keys in an unknown field", appended("Poll", lambda run: unknown(keys(run).encode()))
    ),
    Leak(
        "text with item numbers in an unknown field",
        appended("Poll", lambda run: unknown(decimal(run).encode())),
    ),
    Leak("varints in an unknown field", appended("Register", lambda run: unknown_numbers(shuffled(run)))),
    Leak(
        "packed varints in an unknown field",
        appended("Poll", lambda run: unknown(b"".join(map(varint, shuffled(run))))),
    ),
    Leak(
        "16-bit numbers in an unknown field",
        appended("Poll", lambda run: unknown(np.array(shuffled(run), "<u2").tobytes())),
    ),
    Leak(
        "32-bit numbers, highest byte first, in an unknown field",
        appended("Poll", lambda run: unknown(np.array(shuffled(run), ">u4").tobytes())),
    ),
    Leak("a bitmap in an unknown field", appended("Poll", lambda run: unknown(bitmap(run)))),
    # Payloads.
    Leak(
        "an unknown field behind a contribution",
        submitted(lambda run, payload: payload + unknown(np.array(numbers(run), "<u2").tobytes())),
        only=_SUBMITTING,
    ),
    Leak(
        "item numbers as the padding of a payload",
        submitted(lambda run, payload: payload + b"\xff\xff\xff" + np.array(numbers(run), "<u2").tobytes()),
        only=_SUBMITTING,
    ),
    Leak(
        "item numbers in place of a signature",
        submitted(signed_by(lambda run: np.array(numbers(run), "<u4").tobytes())),
        only=("masked",),
    ),
    Leak(
        "a contribution without its mask or key",
        submitted(in_clear),
        only=("masked", "encrypted", "shared-key"),
    ),
    Leak(
        "the places of a contribution in a sum that is not sparse",
        submitted(sparse),
        only=("masked", "fedmf"),
    ),
    Leak(
        "the user's items first in the catalogue",
        fetched(wire.FetchKind.FETCH_KIND_CATALOGUE, catalogue_first, wire.Catalogue),
    ),
    Leak(
        "item numbers as the name of a tensor",
        fetched(
            wire.FetchKind.FETCH_KIND_MODEL,
            lambda run, m: setattr(m.tensors[0], "name", decimal(run)),
            wire.Model,
        ),
        only=("shielded", "fedncf", "fedmf", "ease", "ials", "fpl", "fedmvmf"),
    ),
    Leak(
        "item numbers as the shape of a tensor",
        fetched(
            wire.FetchKind.FETCH_KIND_MODEL,
            lambda run, m: m.tensors[0].tensor.shape.extend(shuffled(run)),
            wire.Model,
        ),
        only=("shielded", "fedncf", "fedmf", "ease", "ials", "fpl", "fedmvmf"),
    ),
    # What the operator is told.
    Leak(
        "item keys as the name of a party in an event",
        altered("WatchRun", lambda run, m: setattr(m.party, "party", keys(run)), "sent", peer="operator"),
    ),
    Leak(
        "item keys as the name of a metric",
        altered("WatchRun", lambda run, m: metrics(run, m, keys(run)), "sent", peer="operator"),
    ),
    Leak(
        "item numbers in the report that the operator asks for",
        altered(
            "GetReport", lambda run, m: setattr(m, "json", report(run).decode()), "sent", peer="operator"
        ),
    ),
    Leak("item numbers in the report's file", on_file(lambda run: "report.json", report, OPERATOR)),
    Leak("item numbers on the report's page", on_file(lambda run: "report.html", report_page, OPERATOR)),
    # Logs and pages.
    Leak(
        "item numbers in a line of a host's log",
        on_log(lambda run: [{"event": "trained", "items": shuffled(run)}]),
    ),
    Leak(
        "an item number in each of many lines of a host's log",
        on_log(lambda run: [{"event": "stored", "item": n, "id": f"{n * 7919:x}"} for n in numbers(run)]),
    ),
    Leak(
        "item keys in two lines of a host's log",
        on_log(lambda run: [{"event": "stored", "item": key} for key in run.keys[FEW][:2]]),
    ),
    Leak(
        "a bitmap in hexadecimal in a host's log",
        on_log(lambda run: [{"event": "trained", "state": bitmap(run).hex()}]),
    ),
    Leak(
        "item numbers in an error in the server's log",
        on_log(lambda run: [{"event": "refused", "error": f"no place for {decimal(run)}"}], COS),
    ),
    Leak(
        "item numbers as values of a metric's label",
        on_page(lambda run: [f'coterie_items{{item="{n}"}} 1.0' for n in numbers(run)]),
    ),
    Leak(
        "item keys as values of a metric's label",
        on_page(lambda run: [f'coterie_items{{item="{key}"}} 1.0' for key in run.keys[FEW][:2]]),
    ),
    Leak(
        "item numbers as values of a metric",
        on_page(lambda run: [f'coterie_last{{at="{at}"}} {n}.0' for at, n in enumerate(shuffled(run))]),
    ),
    Leak("item numbers on a health page", on_page(lambda run: ["waits for " + decimal(run)], "/healthz")),
    # Files.
    Leak(
        "item keys as the name of a file", on_file(lambda run: f"models/{keys(run)}.bin", lambda run: b"\x00")
    ),
    Leak(
        "item numbers as the name of a file",
        on_file(lambda run: f"models/{decimal(run)}.bin", lambda run: b"\x00"),
    ),
    Leak(
        "item keys in a row of a store", on_file(lambda run: "cos.db", lambda run: stored("other", keys(run)))
    ),
    # What the audit cannot see.
    Leak(
        "encrypted items",
        altered(
            "Poll",
            lambda run, m: m.held_sha256.append(hashlib.sha256(keys(run).encode()).digest()),
        ),
        unseen=True,
    ),
    Leak(
        "three item numbers",
        altered("Poll", lambda run, m: setattr(m, "run_id", "-".join(map(str, numbers(run)[:3])))),
        unseen=True,
    ),
    Leak(
        "numbers of items in an order of their own among other bytes",
        submitted(signed_by(lambda run: b"\xff" + np.array(shuffled(run), "<u2").tobytes())),
        unseen=True,
        only=("masked",),
    ),
    Leak("item numbers as the lengths of chunks", in_chunks, unseen=True),
    Leak(
        "an item's number as the count of messages",
        lambda run: Changed({COS: recorded(run, "Poll", "received", peer=FEW)[:1] * numbers(run)[-1]}),
        unseen=True,
    ),
    Leak("item numbers as the times between messages", at_times, unseen=True),
    Leak(
        "an item key in each of many rows of a store",
        on_file(lambda run: "cos.db", lambda run: stored(*run.keys[FEW])),
        unseen=True,
    ),
    Leak(
        "an item in the last bits of a mean",
        altered("WatchRun", fraction, "sent", peer="operator"),
        unseen=True,
    ),
)
