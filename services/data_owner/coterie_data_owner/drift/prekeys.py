"""Keep an owner's prekeys, to which clients seal records; each is destroyed one hour after it expires."""

from __future__ import annotations

from pathlib import Path

from coterie.crypto import clocks
from coterie.crypto.identity import Identity, Prekey

__all__ = ["Prekeys"]

_RENEW_SHARE = 0.5


class Prekeys:
    """The prekeys of one owner, each in a file of its own; used by the intake.

    Parameters
    ----------
    identity : Identity
        The owner; signs each prekey.
    run_id : str
        Run for which the prekeys are valid.
    folder : Path
        Folder of the files, made with mode 0700.
    hours : float
        Validity of a new prekey.
    """

    def __init__(self, identity: Identity, run_id: str, folder: Path, hours: float) -> None:
        self._identity = identity
        self._run_id = run_id
        self._folder = folder
        self._seconds = int(hours * 3600)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._held: dict[bytes, Prekey] = {}
        for path in folder.glob("*.prekey"):
            prekey = Prekey.load(path)
            self._held[prekey.public.prekey_id] = prekey
        self.destroy_expired()

    def current(self) -> Prekey:
        """Return the prekey to which clients seal now; make a new one when the last is past half its life."""
        self.destroy_expired()
        now = clocks.now()
        newest = max(self._held.values(), key=lambda prekey: prekey.public.expiry, default=None)
        if newest is None or newest.public.expiry - now < self._seconds * _RENEW_SHARE:
            newest = Prekey.generate(self._identity, self._run_id, now + self._seconds)
            newest.save(self._path(newest.public.prekey_id))
            self._held[newest.public.prekey_id] = newest
        return newest

    def find(self, prekey_id: bytes) -> Prekey | None:
        """Return a prekey by its id; None when it is no longer held."""
        return self._held.get(prekey_id)

    def destroy_expired(self) -> None:
        """Destroy prekeys whose grace hour has passed."""
        now = clocks.now()
        for prekey_id in [key for key, prekey in self._held.items() if prekey.expired(now)]:
            del self._held[prekey_id]
            Prekey.destroy(self._path(prekey_id))

    def _path(self, prekey_id: bytes) -> Path:
        return self._folder / f"{prekey_id.hex()}.prekey"
