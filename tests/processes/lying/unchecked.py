"""The real client-host service without its checks of the third party's log, as it was before there was one.

python -P -m tests.processes.lying.unchecked --config FILE [--set KEY=VALUE]
"""

import sys

from coterie.net.transparency import LogWatch


async def _unchecked(self: LogWatch, wanted: object) -> None:
    """Require nothing to be in the log."""
    self._noted.clear()


def main() -> int:
    """Serve without the checks, and return the exit status."""
    LogWatch._require = _unchecked  # type: ignore[method-assign, assignment]

    from coterie.cli.main import invoke

    return invoke(["serve", "client", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
