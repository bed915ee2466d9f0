"""A real intake of a later release: ``coterie serve cos``, which hands calls on in the next version of the hand-over.

    python -P -m tests.processes.later_intake --config FILE [--set KEY=VALUE]

Everything but version and release is the service's own code.
"""

import sys

from coterie.net import vouching
from coterie.wire import versions

RELEASE = "99.1.0"


def main() -> int:
    """Serve as the later release, and return the exit status."""
    vouching.HANDED_OVER += 1
    said = versions.own

    def own(*features):
        own = said(*features)
        own.release = RELEASE
        return own

    vouching.own = own

    from coterie.cli.main import invoke

    return invoke(["serve", "cos", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
