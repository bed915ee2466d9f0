"""The model of a run with rounds at the COS: its arrays, and what participants fetch of it."""

from __future__ import annotations

from coterie.rounds.model_state import ModelState
from coterie.rounds.sides import Arrays
from coterie.store.versions import Versions
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["ServedModel"]


class ServedModel:
    """The model that a run's participants fetch; used by `RoundsRun` once the population is fixed.

    Parameters
    ----------
    kept : ModelState
        How the server keeps the model: open, or sealed.
    versions : Versions
        Earlier versions.
    arrays : dict
        The present version.
    """

    def __init__(self, kept: ModelState, versions: Versions, arrays: Arrays) -> None:
        self.kept = kept
        self._versions = versions
        self.change(arrays)

    def change(self, arrays: Arrays) -> None:
        """Serve other arrays from now on."""
        self.arrays = arrays
        self.payload = self.kept.model(arrays)
        """The model, the payload of FETCH_KIND_MODEL."""
        self.open_items = self.kept.opened(arrays)
        """Which items each group may train, the payload of FETCH_KIND_OPEN_ITEMS."""

    async def read(self, version: int, present: int) -> None:
        """Read a version into memory, so that `of_version` returns it; ``present`` is the number of the present one.

        Raises
        ------
        StoreError
            It cannot be read now.
        """
        if version != present:
            await self._versions.read_version(version)

    def of_version(self, version: int, present: int) -> bytes:
        """Return the model of a version as participants fetch it; ``present`` is the number of the present one.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when the version is not kept; NOT_READY when it has to be read first.
        """
        if version == present:
            return self.payload
        if not self._versions.at_hand(version):
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                f"version {version} is not in memory",
                field="version",
                expected="a call of its own for this version",
            )
        arrays = self._versions.load_version(version)
        if arrays is None and version == 0:
            arrays = self.kept.initial()
        if arrays is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"version {version} is not kept",
                field="version",
                expected="0 for the newest, or the version of an open round",
            )
        return self.kept.model(arrays)

    def closed_share(self) -> float | None:
        """Return the share of all users' training items that is closed to learning; None where nothing is known."""
        return self.kept.closed_share(self.arrays) if self.arrays else None
