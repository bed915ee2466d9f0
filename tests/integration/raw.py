"""HTTP/2 by hand, over mutual TLS: what no gRPC client would ever send."""

import asyncio
import ssl
import struct
import time
from dataclasses import dataclass

from coterie.crypto.authority import logical_name

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind, stream=0, payload=b"", flags=0):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def integer(value, bits):
    """Return an integer as HPACK has it."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    coded, value = bytearray([most]), value - most
    while value >= 128:
        coded.append(value % 128 | 128)
        value //= 128
    return bytes(coded) + bytes([value])


def field(name, value):
    """Return a header field that enters no table."""
    name, value = (part if isinstance(part, bytes) else part.encode() for part in (name, value))
    return b"\x00" + integer(len(name), 7) + name + integer(len(value), 7) + value


def message(data, *, compressed=False):
    """Return a message of gRPC."""
    return struct.pack(">BI", compressed, len(data)) + data


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class Raw:
    """A connection on which the test writes what it likes."""

    def __init__(self, reader, writer, authority):
        self.reader, self._writer, self._authority = reader, writer, authority
        self._next = 1
        self.closed = False

    @classmethod
    async def to(cls, service, tls=None, *, address=None, source=None):
        """Connect to a service, from an address; without files of TLS no certificate is shown."""
        host, _, port = (address or service.address).rpartition(":")
        authority = (tls or service).authority if tls else service.ca_file
        context = ssl.create_default_context(cafile=str(authority))
        if tls:
            context.load_cert_chain(tls.chain, tls.key)
        context.set_alpn_protocols(["h2"])
        name = logical_name(service.role, service.name)
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=name, local_addr=source and (source, 0)
        )
        return cls(reader, writer, name)

    async def begin(self, settings=b""):
        """Send the preface."""
        await self.send(PREFACE + frame(SETTINGS, payload=settings))
        return self

    async def send(self, data):
        """Write; once the other side has closed, note that."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (ConnectionError, ssl.SSLError):
            self.closed = True

    def call_headers(self, method, *further):
        usual = [
            (":method", "POST"),
            (":scheme", "https"),
            (":path", method),
            (":authority", self._authority),
        ]
        usual += [("te", "trailers"), ("content-type", "application/grpc")]
        return b"".join(field(*one) for one in [*usual, *further])

    def new_stream(self):
        self._next += 2
        return self._next - 2

    async def call(self, method, *data, end=True, further=()):
        """Begin a call and send messages; return its stream."""
        stream = self.new_stream()
        sent = frame(HEADERS, stream, self.call_headers(method, *further), END_HEADERS)
        for n, one in enumerate(data):
            sent += frame(DATA, stream, one, END_STREAM if end and n == len(data) - 1 else 0)
        await self.send(sent)
        return stream

    async def frames(self, limit_s):
        """Yield what arrives, for so long or until the other side closes; pings are answered."""
        ends = time.monotonic() + limit_s
        try:
            while True:
                async with asyncio.timeout(ends - time.monotonic()):
                    head = await self.reader.readexactly(9)
                    payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                one = Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                if one.kind in (PING, SETTINGS) and not one.flags & ACK:
                    await self.send(frame(one.kind, 0, payload if one.kind == PING else b"", ACK))
                yield one
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            self.closed = True
        except TimeoutError:
            return

    async def ends(self, limit_s):
        """Yield the streams that the other side ends, for so long or until it closes the connection."""
        async for one in self.frames(limit_s):
            if one.kind == RST_STREAM or (one.kind in (DATA, HEADERS) and one.flags & END_STREAM):
                yield one.stream

    async def ended(self, streams, limit_s):
        """Return those of some streams that the other side ended within a time; all where it closes the connection."""
        left = set(streams)
        async for stream in self.ends(limit_s):
            left.discard(stream)
            if not left:
                break
        return set(streams) if self.closed else set(streams) - left

    async def trailers(self, stream, limit_s):
        """Return the last headers of a stream, as they are packed."""
        async for one in self.frames(limit_s):
            if one.stream == stream and one.kind == HEADERS and one.flags & END_STREAM:
                return one.payload
        return b""

    async def until_closed(self, limit_s):
        """Return whether the other side closes the connection, or says that it takes no more, within a time."""
        async for one in self.frames(limit_s):
            if one.kind == GOAWAY:
                return True
        return self.closed

    async def close(self):
        self._writer.transport.abort()
