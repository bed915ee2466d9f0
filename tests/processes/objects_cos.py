"""A real COS with a store of objects that may be slow, full or away: ``coterie serve cos`` that knows ``faulty``.

    python -P -m tests.processes.objects_cos --config FILE [--set KEY=VALUE]

Everything but the protocol's implementation, as a package of its own would bring it, is the service's own code.
"""

import sys

from .. import object_stores

__all__ = ["main", "object_stores"]


def main() -> int:
    """Serve, and return the exit status."""
    from coterie.cli.main import invoke

    return invoke(["serve", "cos", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
