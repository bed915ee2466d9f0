"""A real client host that takes its few users for very many: all that is large for each stays in files.

python -P -m tests.processes.host_in_blocks --config FILE [--set KEY=VALUE]
"""

import sys

from coterie_client import history

from coterie.crypto import identity
from coterie.launch.parties import Laid
from coterie.net import enrolment

from .programs import ProgramChild
from .running import Running

_FEW = 7


class InBlocks(Running):
    """A federation of real processes whose hosts read seven users at once."""

    def _configure(self) -> Laid:
        laid = super()._configure()
        for party in self.parties("client"):
            host = self.children[party]
            self.children[party] = ProgramChild(
                host.role, host.name, host.folder, program=["tests.processes.host_in_blocks"]
            )
        return laid


def main() -> int:
    """Serve the host of the command line, and return the exit status."""
    history.IN_MEMORY = history.USERS_AT_ONCE = _FEW
    enrolment._IN_MEMORY = _FEW
    identity._MADE = _FEW

    from coterie.cli.main import invoke

    return invoke(["serve", "client", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
