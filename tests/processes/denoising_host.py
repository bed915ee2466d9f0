"""A real client host that fails its part in denoised sums: ``coterie serve client``, with one lie.

    python -P -m tests.processes.denoising_host LIE --config FILE [--set KEY=VALUE]

Everything but the lie is the service's own code.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.crypto.identity import Identity
from coterie.launch.parties import Laid
from coterie.parties import denoising
from coterie.secure_sum import denoised
from coterie.secure_sum.denoised import Denoiser
from coterie.studies.run_data import Feed
from coterie.wire.v1 import rounds_pb2

from .programs import ProgramChild
from .running import Running


class Failing(Running):
    """A federation of real processes in which programs of the tests serve some parties.

    Parameters
    ----------
    programs : mapping of str to sequence of str
        Module and its arguments, by party.
    """

    def __init__(
        self,
        settings: RunSettings,
        feed: Feed,
        folder: Path,
        programs: Mapping[str, list[str]],
        **options: Any,
    ) -> None:
        super().__init__(settings, feed, folder, **options)
        self._programs = programs

    def _configure(self) -> Laid:
        laid = super()._configure()
        for party, program in self._programs.items():
            honest = self.children[party]
            self.children[party] = ProgramChild(honest.role, honest.name, honest.folder, program=program)
        return laid


class Liar(Denoiser):
    """A denoiser whose first sum is wrong by one step."""

    def reveal(self, members: Collection[int]) -> bytes:
        """Return the sums, the first of them wrong."""
        message = rounds_pb2.NoiseSums.FromString(super().reveal(members))
        steps = np.frombuffer(message.sums[0].steps, "<i4").copy()
        steps[0] += 1
        message.sums[0].steps = steps.tobytes()
        return message.SerializeToString()


def _lie() -> None:
    denoising.Denoiser = Liar  # type: ignore[misc]


def _garble() -> None:
    """Seal noise of one user that opens for nobody."""
    honest = denoised.seal_noise
    liars: list[bytes] = []

    def garbled(member: Identity, *given: Any) -> bytes:
        sealed = honest(member, *given)
        liars.append(member.participant_id)
        return bytes(len(sealed)) if member.participant_id == liars[0] else sealed

    denoised.seal_noise = garbled


LIES: Mapping[str, Callable[[], None]] = {"lies": _lie, "garbles": _garble}


def main() -> int:
    """Serve with the lie of the command line, and return the exit status."""
    lie, *serving = sys.argv[1:]
    LIES[lie]()

    from coterie.cli.main import invoke

    return invoke(["serve", "client", *serving])


if __name__ == "__main__":
    sys.exit(main())
