"""A real client host that lies: ``coterie serve client``, whose users poison what they learn from and send.

    python -P -m tests.processes.poisoning_host ATTACK --config FILE [--set KEY=VALUE]

Everything but the lie is the service's own code.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from coterie_client import learner
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.launch.parties import Laid
from coterie.rounds.sides import HostSide, KeepPrivate
from coterie.studies.poisoning import POISONINGS, poisoned_host
from coterie.studies.run_data import Feed
from coterie.systems.private_sides import planned_host_side
from coterie.systems.registry import ratings_of
from coterie.systems.shared.host_data import HostData
from coterie.wire.v1.orchestrator_pb2 import RunPlan

from .programs import ProgramChild
from .running import Running


class Poisoned(Running):
    """A federation of real processes with one host whose users all lie.

    Parameters
    ----------
    liar : str
        Party of this host.
    attack : str
        Name of the attack.
    """

    def __init__(
        self, settings: RunSettings, feed: Feed, folder: Path, liar: str, attack: str, **options: Any
    ) -> None:
        super().__init__(settings, feed, folder, **options)
        self._liar, self._attack = liar, attack

    def _configure(self) -> Laid:
        laid = super()._configure()
        honest = self.children[self._liar]
        self.children[self._liar] = ProgramChild(
            honest.role, honest.name, honest.folder, program=["tests.processes.poisoning_host", self._attack]
        )
        return laid


def main() -> int:
    """Serve with the attack of the command line, and return the exit status."""
    attack, *serving = sys.argv[1:]

    def lying(plan: RunPlan, data: HostData, keys: NDArray[np.uint64], keep: KeepPrivate) -> HostSide:
        return poisoned_host(
            POISONINGS[attack],
            np.ones(len(data.users), np.bool_),
            0,
            ratings_of(plan.system, plan.settings),
            0,
            data,
            lambda own: planned_host_side(plan, own, keys, keep),
        )

    learner.planned_host_side = lying

    from coterie.cli.main import invoke

    return invoke(["serve", "client", *serving])


if __name__ == "__main__":
    sys.exit(main())
