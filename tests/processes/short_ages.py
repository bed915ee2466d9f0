"""A real service for which ten minutes without the third party are seconds, and which reads its clock from a file.

    python -P -m tests.processes.short_ages ROLE --config FILE [--set KEY=VALUE]

Everything but these times is the service's own code, as ``coterie serve ROLE`` runs it.
"""

import sys
from typing import Any

from coterie.cli.main import main as command
from coterie.net import revocation, transparency

from .programs import ProgramChild
from .running import Running
from .test_clocks import FAKETIME

STALE_S = 12.0
"""Age from which on a revocation list is stale, instead of ten minutes, seconds."""

DAY_S = 86_400


class Calendar(Running):
    """A federation of real processes with one clock for all of them, which a test sets forward by days."""

    def _configure(self) -> Any:
        laid = super()._configure()
        self.clock = self.folder / "clock"
        self.days_pass(0)
        for party, right in list(self.children.items()):
            timed = self.children[party] = ProgramChild(
                right.role,
                right.name,
                right.folder,
                program=["tests.processes.short_ages", right.role],
                variables={
                    "LD_PRELOAD": str(FAKETIME),
                    "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                    "FAKETIME_NO_CACHE": "1",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                },
            )
            self._late = [timed if child is right else child for child in self._late]
        return laid

    def days_pass(self, days: int) -> None:
        """Let the clock of every party be ahead of the right one by some days from now on."""
        new = self.clock.with_suffix(".new")
        new.write_text(f"+{days * DAY_S}s\n")
        new.replace(self.clock)


def main() -> None:
    """Serve the role of the command line."""
    revocation.STALE_S = STALE_S
    revocation.HOLD_S = STALE_S / 4
    transparency._AWAY_S = STALE_S
    sys.argv[1:1] = ["serve"]
    command()


if __name__ == "__main__":
    main()
