"""Ask a service on this machine for its gRPC health: status 0 when it is SERVING, 1 when not, with the reason.

    probe.py [--alive] [STATE [HOST:PORT]]          (default: state 127.0.0.1:7443)

The question is a real call of ``grpc.health.v1.Health/Check`` over mutual TLS with the service's own certificate, so an
answer also means that the event loop runs, the port is open and the certificate is valid.  ``--alive`` accepts any
answer, because a service that waits for its peers is alive and reports that it is not SERVING.  The script uses the
standard library only: this suffices for one call of HTTP/2, and starts ten times as fast as gRPC.
"""

import socket
import ssl
import sys
from pathlib import Path

TIMEOUT_S = 3.0

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_EMPTY_MESSAGE = bytes(5)
_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


class NotServingError(Exception):
    """The service is not healthy; the text says why."""


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _header(name: str, value: str) -> bytes:
    """Write one header as HPACK's literal without indexing; both texts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _request() -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "https",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(_header(name, value) for name, value in headers.items())
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
    )


def _connect(state: Path, address: str) -> ssl.SSLSocket:
    tls = state / "tls"
    chain = tls / "chain.pem"
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    context.check_hostname = False  # the certificate itself is compared below
    context.load_cert_chain(chain, tls / "key.pem")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
    connection = context.wrap_socket(plain)
    own, end, _ = chain.read_text().partition("-----END CERTIFICATE-----")
    if connection.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(own + end):
        raise NotServingError(f"{address} shows another certificate than {chain}")
    return connection


def _answer(connection: ssl.SSLSocket) -> bytes:
    """Read frames until the answer has come; return the message without its length, or nothing for a refusal."""
    held = b""
    while True:
        part = connection.recv(16384)
        if not part:
            raise NotServingError("the connection was closed without an answer")
        held += part
        while len(held) >= 9:
            length, kind, flags = int.from_bytes(held[:3], "big"), held[3], held[4]
            if len(held) < 9 + length:
                break
            payload, held = held[9 : 9 + length], held[9 + length :]
            if kind == _DATA and len(payload) >= 5:
                return payload[5:]
            if kind == _SETTINGS and not flags & _ACK:
                connection.sendall(_frame(_SETTINGS, _ACK, 0))
            elif kind == _HEADERS and flags & _END_STREAM:
                return b""
            elif kind in (_RST_STREAM, _GOAWAY):
                raise NotServingError("the call was cut off")


def check(state: Path, address: str, *, alive: bool = False) -> None:
    """Return if the service answers that it is SERVING; with ``alive``, if it gives any answer.

    Raises
    ------
    NotServingError
        The service answers something else, or refuses.
    OSError
        The service cannot be reached, or there is no certificate yet.
    """
    with _connect(state, address) as connection:
        connection.sendall(_request())
        answer = _answer(connection)
    if not alive and answer != _SERVING:
        raise NotServingError("NOT_SERVING" if answer else "the call was refused")


def main() -> None:
    """Probe and end the process."""
    words = sys.argv[1:]
    if alive := words[:1] == ["--alive"]:
        del words[0]
    state = words[0] if words else "state"
    address = words[1] if len(words) > 1 else "127.0.0.1:7443"
    try:
        check(Path(state), address, alive=alive)
    except (NotServingError, OSError, ValueError) as error:
        sys.exit(f"not {'alive' if alive else 'serving'}: {error}")
    print("alive" if alive else "SERVING")


if __name__ == "__main__":
    main()
