"""The third party's keys to which users seal requests: drawn, kept in one private file, replaced, destroyed."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto import clocks
from coterie.crypto.graph_requests import SealingSecret
from coterie.crypto.keyfile import read_marked_file, write_marked_file
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["SealingKeys"]

_FILE = b"coterie sealing keys 1\n"
_ROW = struct.Struct(">32s8sQ")
_VALID_S = 7 * 24 * 3600
_GRACE_S = 3600


class SealingKeys:
    """The keys that are valid now, and those that expired less than an hour ago.

    A key is offered for the first half of its seven days; after that a new one is.  When a new key is drawn, those that
    expired an hour ago are destroyed, so that their later theft opens no recorded request.  Threads may share the
    object.

    Parameters
    ----------
    path : Path
        File with the secret halves, mode 0600; made at the first use.
    directory : Ed25519PrivateKey
        Key of the directory, which signs the public halves.
    clock : callable, optional
        Gives Unix seconds.

    Raises
    ------
    CertificateError
        When the file is damaged, or readable by others.
    """

    def __init__(
        self, path: Path, directory: Ed25519PrivateKey, clock: Callable[[], float] = clocks.now_s
    ) -> None:
        self._path = path
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: list[SealingSecret] = []
        if path.exists():
            rows = _ROW.iter_unpack(read_marked_file(path, _FILE, "sealing keys"))
            self._keys = [
                SealingSecret.of(private, key_id, expiry, directory) for private, key_id, expiry in rows
            ]

    def current(self) -> SealingSecret:
        """Return the key to offer now; draw one, durably, where it is time to.

        Raises
        ------
        CertificateError
            When the file cannot be written.
        """
        with self._lock:
            return self._current(int(self._clock()))

    def _current(self, now: int) -> SealingSecret:
        if not self._keys or self._keys[-1].public.expiry - now < _VALID_S // 2:
            held = [one for one in self._keys if now < one.public.expiry + _GRACE_S]
            held.append(SealingSecret.generate(self._directory, now + _VALID_S))
            write_marked_file(
                self._path,
                _FILE,
                b"".join(
                    _ROW.pack(one.private_bytes(), one.public.key_id, one.public.expiry) for one in held
                ),
            )
            self._keys = held
        return self._keys[-1]

    def find(self, key_id: bytes) -> SealingSecret:
        """Return the key of an id.

        Raises
        ------
        Refusal
            UNKNOWN_PREKEY when there is no such key, or not any more.
        """
        now = int(self._clock())
        for one in self._keys:
            if one.public.key_id == key_id and now < one.public.expiry + _GRACE_S:
                return one
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PREKEY,
            "sealed to a key that is not held here, or not any more",
            field="request.key_id",
            expected="the key that SealingKey returns now",
        )
