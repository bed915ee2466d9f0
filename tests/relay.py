"""Somebody on the way between a caller and a service.

The standard library is all that this file takes, so that a container can run it: `python3 relay.py PORT` does what it
is told over that port, each order and each answer a line of JSON.
"""

import asyncio
import contextlib
import json
import ssl
import sys
from pathlib import Path


def _context(side, files):
    """Return a side of TLS that shows a certificate and looks at nobody's."""
    context = ssl.SSLContext(side)
    if side is ssl.PROTOCOL_TLS_CLIENT:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(*files)
    context.set_alpn_protocols(["h2"])
    return context


class Between:
    """Hands on what arrives, and keeps a copy of what callers send.

    Parameters
    ----------
    target : str
        Address of the service.
    shown : pair of str, optional
        Chain and key with which it ends the connections itself, to make others to the service; without, it sees what
        anybody sees on the network.
    name : str
        Whom it asks the service to be.
    onward : pair of str, optional
        Chain and key that it shows to the service; `shown` unless given.
    listen : str
        Where it waits for callers.
    """

    def __init__(self, target, shown=None, name="", onward=None, listen="127.0.0.1:0"):
        self._target, self._shown, self._name, self._onward = target, shown, name, onward or shown
        self._listen = listen
        self.flows = []
        """Bytes that each connection sent to the service."""
        self.greeted = []
        """Names that callers asked the relay to have, whether or not they then accepted it."""
        self._tasks = set()

    @property
    def seen(self):
        """Everything that callers sent."""
        return b"".join(map(bytes, self.flows))

    async def __aenter__(self):
        host, _, port = self._listen.rpartition(":")
        context = None
        if self._shown is not None:
            context = _context(ssl.PROTOCOL_TLS_SERVER, self._shown)
            context.sni_callback = lambda *greeting: self.greeted.append(greeting[1])
        self._server = await asyncio.start_server(self._met, host, int(port), ssl=context)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _met(self, reader, writer):
        # A task of ours: the server's own are not waited for at its end.
        task = asyncio.create_task(self._hand_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_on(self, reader, writer):
        onward = _context(ssl.PROTOCOL_TLS_CLIENT, self._onward) if self._onward else None
        ways = [writer]
        # Where the service is not there, or does not take what it is shown, the caller is cut off.
        with contextlib.suppress(OSError):
            try:
                there, back = await opened(self._target, onward, self._name)
                ways.append(back)
                self.flows.append(flow := bytearray())
                await asyncio.gather(self._carry(reader, back, flow), self._carry(there, writer, None))
            finally:
                for way in ways:
                    if not way.is_closing():
                        way.transport.abort()

    async def _carry(self, source, sink, flow):
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if flow is not None:
                    flow += data
                sink.write(data)
                await sink.drain()
        sink.close()


async def opened(address, context=None, name=""):
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname=name if context else None
    )


async def replay(data, address, shown=None, name="", *, piece=1 << 20, limit_s=20.0):
    """Send a recorded connection again over one of one's own, its greeting first.

    With `shown`, a chain and a key, it is sent inside TLS.  Return what came back until the other side closed or the
    time was up, and whether it closed.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, shown) if shown else None
    reader, writer = await opened(address, context, name)
    answer, answered = bytearray(), asyncio.Event()

    async def listen():
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                answer.extend(part)
                answered.set()
        answered.set()

    # The first record of TLS, or what HTTP/2 begins with.
    greeting = 24 if shown else 5 + int.from_bytes(data[3:5], "big")
    listening = asyncio.create_task(listen())
    with contextlib.suppress(OSError):
        writer.write(data[:greeting])
        await asyncio.wait_for(answered.wait(), limit_s)
        for at in range(greeting, len(data), piece):
            writer.write(data[at : at + piece])
            await writer.drain()
            await asyncio.sleep(0.01)
    await asyncio.wait({listening}, timeout=limit_s)
    closed = listening.done()
    listening.cancel()
    writer.transport.abort()
    return bytes(answer), closed


class Attacker:
    """Relays by port, as orders say."""

    def __init__(self):
        self._relays = {}

    async def listen(self, port, **how):
        """Have a relay at a port in place of the one before."""
        if port in self._relays:
            await self._relays[port].__aexit__()
        relay = self._relays[port] = Between(listen=f"0.0.0.0:{port}", **how)
        await relay.__aenter__()

    async def report(self, port, find=""):
        """Say what came to a port, and whether a text is in it."""
        relay = self._relays[port]
        return {
            "greeted": relay.greeted,
            "flows": [len(flow) for flow in relay.flows],
            "found": find.encode() in relay.seen,
        }

    async def keep(self, port, path):
        """Keep what the first connection to a port sent in a file."""
        Path(path).write_bytes(self._relays[port].flows[0])

    async def again(self, path, **where):
        """Send it again."""
        answer, closed = await replay(Path(path).read_bytes(), **where)
        return {"answered": len(answer), "closed": closed, "kind": answer[:1].hex()}

    async def obey(self, reader, writer):
        """Do one order after the other."""
        while line := await reader.readline():
            order = json.loads(line)
            done = await getattr(self, order.pop("do"))(**order)
            writer.write(json.dumps(done).encode() + b"\n")
            await writer.drain()
        writer.close()


async def main(port):
    """Wait for orders for ever."""
    server = await asyncio.start_server(Attacker().obey, "0.0.0.0", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
