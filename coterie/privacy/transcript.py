"""Transcripts: files of the messages that a party received and sent, with time, peer and RPC.

Attacks and audits work on transcripts only, never on what a party is supposed to know.  A file is::

    magic (8 bytes), u16 length and UTF-8 name of the party, then entries

and an entry is a fixed header, the names of RPC and peer, and the raw message, little-endian throughout::

    u32 bytes after the header | u32 CRC-32 of these | i64 nanoseconds since 1970
    u8 side | u8 direction | u8 length of rpc | u8 length of peer | rpc | peer | payload

An entry is handed to the operating system before its message is processed.  So a process that is killed leaves all
messages that it took in, and at most one incomplete entry at the end: readers ignore it, and a writer that opens the
file again cuts it off before it appends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from google.protobuf import message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message

from coterie.errors import StoreError
from coterie.wire.pieces import pieces
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import (
    client_pb2,
    data_owner_pb2,
    expansion_pb2,
    intakes_pb2,
    latency_pb2,
    latents_pb2,
    log_pb2,
    operator_pb2,
    orchestrator_pb2,
    thirdparty_pb2,
)
from coterie.wire.v1.orchestrator_pb2 import PollResponse, SubmitRequest, SubmitResponse

__all__ = [
    "Side",
    "TranscriptEntry",
    "TranscriptWriter",
    "decode",
    "message_class",
    "read_transcript",
    "role_of",
    "transcript_party",
]

_MAGIC = b"CTRSCR1\n"
_HEADER = struct.Struct("<IIqBBBB")
_SIDES = ("server", "client")
_DIRECTIONS = ("received", "sent")
_MOST_WAITING = 16 << 20
"""Most bytes that wait in memory while the volume is full."""


@dataclass(frozen=True)
class TranscriptEntry:
    """One message of a transcript.

    Attributes
    ----------
    time_ns : int
        When it was recorded, nanoseconds since 1970 by the clock of the party.
    rpc : str
        Short name of the RPC, ``"Exchange"``.
    peer : str
        Role and name of the other end, ``"data-owner/drama"``; the role is empty without a certificate.
    direction : str
        ``"received"`` or ``"sent"``.
    payload : bytes
        The serialised message.
    party : str
        Role and name of the party whose transcript it is.
    side : str
        ``"server"`` if the party served the call, ``"client"`` if it made it.
    """

    time_ns: int
    rpc: str
    peer: str
    direction: str
    payload: bytes
    party: str
    side: str


def role_of(party: str) -> str:
    """Return the role of a party or peer: ``"data-owner"`` for ``"data-owner/drama"``."""
    return party.partition("/")[0]


class Side:
    """A recorder for the calls that a process serves, or for those that it makes; see ``TranscriptWriter.side``."""

    def __init__(self, writer: TranscriptWriter, side: str) -> None:
        self._writer = writer
        self._side = side

    def record(self, *, rpc: str, peer: str, direction: str, payload: bytes) -> None:
        """Append one message; see ``TranscriptWriter.record``."""
        self._writer.record(rpc=rpc, peer=peer, direction=direction, payload=payload, side=self._side)


class TranscriptWriter:
    """Appends messages to a transcript.

    ``record`` may be called from any thread.  On a full volume entries wait for the next call that finds room.

    Parameters
    ----------
    path : Path or str
        File to append to; made with mode 0600 where it does not exist.
    party : str
        Role and name of the party, ``"cos/cos"``; a file of another party is not continued.

    Raises
    ------
    StoreError
        When the file cannot be opened, is no transcript of this party, is damaged, or has a writer already.
    """

    def __init__(self, path: Path | str, party: str) -> None:
        self.path = Path(path)
        self.party = party
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self._file = self._open()

    def __enter__(self) -> TranscriptWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def side(self, side: str) -> Side:
        """Return a recorder for the calls that the party serves (``"server"``) or makes (``"client"``)."""
        _code(side, _SIDES, "side")
        return Side(self, side)

    def record(self, *, rpc: str, peer: str, direction: str, payload: bytes, side: str | None = None) -> None:
        """Append one message.

        Parameters
        ----------
        rpc : str
            Short name of the RPC.
        peer : str
            Role and name of the other end.
        direction : str
            ``"received"`` or ``"sent"``.
        payload : bytes
            The serialised message.
        side : str, optional
            ``"server"`` or ``"client"``; derived from the roles and the RPC where it is not given.

        Raises
        ------
        ValueError
            For another direction or side, or a name longer than 255 bytes: programming errors.
        StoreError
            After ``close``.
        """
        if side is None:
            side = _side_of(self.party, peer, rpc)
        names = (rpc.encode(), peer.encode())
        if max(map(len, names)) > 0xFF:
            raise ValueError(f"a name of rpc {rpc!r} or peer {peer!r} is longer than 255 bytes")
        body = b"".join((*names, payload))
        header = _HEADER.pack(
            len(body),
            zlib.crc32(body),
            time.time_ns(),
            _code(side, _SIDES, "side"),
            _code(direction, _DIRECTIONS, "direction"),
            *map(len, names),
        )
        with self._lock:
            if self._file.closed:
                raise StoreError(f"transcript {self.path} is closed")
            self._waiting += header
            self._waiting += body
            self._write_out()

    def close(self) -> None:
        """Write the waiting entries and close the file; closing again does nothing."""
        with self._lock:
            if self._file.closed:
                return
            self._write_out()
            self._file.close()

    def _open(self) -> BinaryIO:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file = os.fdopen(descriptor, "r+b", buffering=0)
        except OSError as error:
            raise StoreError(f"cannot open transcript {self.path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(
                    f"transcript {self.path} is being written by another process",
                    hint="give each process a folder of its own",
                ) from error
            # An existing file may have another mode.
            os.fchmod(file.fileno(), 0o600)
            end = self._recover(file)
            file.truncate(end)
            file.seek(end)
            if end == 0:
                file.write(_preamble(self.party))
        except BaseException:
            file.close()
            raise
        return file

    def _recover(self, file: BinaryIO) -> int:
        """Return the end of the last whole entry; 0 for a file without a whole preamble."""
        with self.path.open("rb") as reader:
            held = _read_party(reader, self.path)
            if held is None:
                return 0
            if held != self.party:
                raise StoreError(
                    f"transcript {self.path} is that of {held}, not of {self.party}",
                    hint="move it away, or give this party a folder of its own",
                )
            start = reader.tell()
            ends = (end for _, end in _entries(reader, self.path, held))
            return max(ends, default=start)

    def _write_out(self) -> None:
        view = memoryview(bytes(self._waiting))
        try:
            while view:
                # Unbuffered writes may be partial.
                view = view[self._file.write(view) :]
        except OSError as error:
            # On a full volume the rest waits for room, and no call fails.
            if len(view) > _MOST_WAITING:
                raise StoreError(
                    f"cannot write transcript {self.path}: {error.strerror}", hint="free space on its volume"
                ) from error
        finally:
            del self._waiting[: len(self._waiting) - len(view)]


def read_transcript(path: Path | str) -> Iterator[TranscriptEntry]:
    """Read a transcript, also while it is being written.

    Parameters
    ----------
    path : Path or str
        The file.

    Yields
    ------
    Entry
        In the order of recording; an incomplete last entry is left out.  Fetches that an answer saved, because it had
        their answers attached, follow it as if they had been made; pieces of a submission that came in one message are
        entries of their own.

    Raises
    ------
    StoreError
        When the file cannot be read, is no transcript, or is damaged before its end.
    """
    path = Path(path)
    try:
        reader = path.open("rb")
    except OSError as error:
        raise StoreError(f"cannot read transcript {path}: {error.strerror}") from error
    with reader:
        party = _read_party(reader, path)
        if party is not None:
            for entry, _ in _entries(reader, path, party):
                yield from _apart(entry)
                yield from _attached(entry)


def transcript_party(path: Path | str) -> str | None:
    """Return the party whose transcript a file is, or None for any other file."""
    try:
        with Path(path).open("rb") as reader:
            return _read_party(reader, Path(path))
    except (OSError, StoreError):
        return None


def message_class(entry: TranscriptEntry) -> type[Message] | None:
    """Return the class of an entry's message; None for RPCs outside the contract (health, reflection).

    An RPC's name alone is not enough: the COS and a client's user agent both serve a ``Recommend``.  The role
    of whoever served the call decides.
    """
    server = entry.party if entry.side == "server" else entry.peer
    classes = _METHODS.get((role_of(server), entry.rpc))
    if classes is None:
        return None
    is_request = (entry.side == "server") == (entry.direction == "received")
    return classes[0] if is_request else classes[1]


def _apart(entry: TranscriptEntry) -> Iterator[TranscriptEntry]:
    """Yield the pieces of a submission one by one, and any other entry as it is."""
    if message_class(entry) is SubmitRequest:
        with contextlib.suppress(StoreError, Refusal):
            message = decode(entry)
            if isinstance(message, SubmitRequest) and message.more:
                found = [replace(entry, payload=piece.SerializeToString()) for piece in pieces(message)]
                yield from found
                return
    yield entry


def _attached(entry: TranscriptEntry) -> Iterator[TranscriptEntry]:
    """Yield the answers attached to an answer, each as the request and the answer that it replaces."""
    cls = message_class(entry)
    if cls not in (PollResponse, SubmitResponse):
        return
    try:
        message = decode(entry)
    except StoreError:
        return
    answer = message.next if isinstance(message, SubmitResponse) else message
    if isinstance(answer, PollResponse):
        other = next(each for each in _DIRECTIONS if each != entry.direction)
        for one in answer.attached:
            fetch = replace(entry, rpc="Fetch", direction=other, payload=one.request.SerializeToString())
            yield fetch
            yield replace(fetch, direction=entry.direction, payload=one.response.SerializeToString())


def decode(entry: TranscriptEntry) -> Message:
    """Return the message of an entry.

    Raises
    ------
    StoreError
        When the RPC is not of the contract, or the payload is no message of its class.
    """
    cls = message_class(entry)
    if cls is None:
        raise StoreError(f"{entry.rpc} between {entry.party} and {entry.peer} is no RPC of the contract")
    try:
        return cls.FromString(entry.payload)
    except DecodeError as error:
        raise StoreError(
            f"{len(entry.payload)} bytes of {entry.party} for {entry.rpc} are no {cls.DESCRIPTOR.name}"
        ) from error


def _code(value: str, choices: tuple[str, ...], name: str) -> int:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(choices)}")
    return choices.index(value)


def _side_of(party: str, peer: str, rpc: str) -> str:
    # The COS is never a client of those that call it, so a call with it that it can serve is a call to it.
    to_cos = role_of(peer) == "cos" and ("cos", rpc) in _METHODS
    return "server" if (role_of(party), rpc) in _METHODS and not to_cos else "client"


def _preamble(party: str) -> bytes:
    name = party.encode()
    return _MAGIC + struct.pack("<H", len(name)) + name


def _read_party(reader: BinaryIO, path: Path) -> str | None:
    """Read the preamble and return the party; None when the preamble is cut short."""
    start = reader.read(len(_MAGIC) + 2)
    if not start.startswith(_MAGIC[: len(start)]):
        raise StoreError(
            f"{path} is not a transcript", hint="transcripts are written by services when asked to"
        )
    if len(start) < len(_MAGIC) + 2:
        return None
    (length,) = struct.unpack_from("<H", start, len(_MAGIC))
    name = reader.read(length)
    return name.decode() if len(name) == length else None


def _entries(reader: BinaryIO, path: Path, party: str) -> Iterator[tuple[TranscriptEntry, int]]:
    """Yield whole entries, each with the position of its end."""
    position = reader.tell()
    while True:
        header = reader.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return
        length, checksum, time_ns, side, direction, rpc_length, peer_length = _HEADER.unpack(header)
        body = reader.read(length)
        if len(body) < length:
            return
        names = rpc_length + peer_length
        if zlib.crc32(body) != checksum or max(side, direction) > 1 or names > length:
            raise StoreError(
                f"transcript {path} is damaged at byte {position}", hint="the entries before it are readable"
            )
        position += _HEADER.size + length
        yield (
            TranscriptEntry(
                time_ns=time_ns,
                rpc=body[:rpc_length].decode(),
                peer=body[rpc_length:names].decode(),
                direction=_DIRECTIONS[direction],
                payload=body[names:],
                party=party,
                side=_SIDES[side],
            ),
            position,
        )


def _methods_of(
    role: str, file: FileDescriptor, only: str = ""
) -> Iterator[tuple[tuple[str, str], tuple[type[Message], ...]]]:
    for service in file.services_by_name.values():
        if only not in ("", service.name):
            continue
        for method in service.methods:
            types = (method.input_type, method.output_type)
            yield (role, method.name), tuple(message_factory.GetMessageClass(each) for each in types)


_OFFERING = ("cos", "data-owner", "client", "decrypting-client", "thirdparty")

_METHODS: Mapping[tuple[str, str], tuple[type[Message], ...]] = MappingProxyType(
    dict(
        itertools.chain(
            _methods_of("cos", orchestrator_pb2.DESCRIPTOR),
            _methods_of("cos", operator_pb2.DESCRIPTOR),
            _methods_of("cos", intakes_pb2.DESCRIPTOR),
            _methods_of("data-owner", data_owner_pb2.DESCRIPTOR),
            _methods_of("client", client_pb2.DESCRIPTOR),
            _methods_of("thirdparty", thirdparty_pb2.DESCRIPTOR),
            _methods_of("thirdparty", expansion_pb2.DESCRIPTOR, "GraphExpansion"),
            _methods_of("cos", expansion_pb2.DESCRIPTOR, "ExpansionRelay"),
            _methods_of("thirdparty", latents_pb2.DESCRIPTOR, "MetaLatents"),
            _methods_of("cos", latents_pb2.DESCRIPTOR, "LatentRelay"),
            _methods_of("thirdparty", log_pb2.DESCRIPTOR, "TransparencyLog"),
            _methods_of("cos", log_pb2.DESCRIPTOR, "LogGossip"),
            _methods_of("data-owner", log_pb2.DESCRIPTOR, "LogGossip"),
            # In latency.proto every role offers `Probe`, and the COS alone also offers `Latency`.
            *(_methods_of(role, latency_pb2.DESCRIPTOR) for role in _OFFERING),
        )
    )
)
"""Request and response class by (role that serves, RPC)."""
