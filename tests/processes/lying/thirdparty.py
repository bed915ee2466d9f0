"""The real third-party service with a lie: it keeps the countersigned bundles of some parties from its log.

    python -P -m tests.processes.lying.thirdparty PARTY[,PARTY] --config FILE [--set KEY=VALUE]

Everything else is the service's own code: such a party enrols, and everybody takes its bundles.
"""

import sys
from collections.abc import Sequence

import sqlalchemy as sa

from coterie.store import thirdparty as store
from coterie.store import thirdparty_log as log
from coterie.store.thirdparty import Published, Redemption


def main() -> int:
    """Serve with the lie of the command line, and return the exit status."""
    hidden, *serving = sys.argv[1:]
    parties, honest = hidden.split(","), store._publish

    def publish(connection: sa.Connection, token: Redemption, published: Sequence[Published]) -> None:
        before = log.size_of(connection)
        honest(connection, token, published)
        if token.party in parties:
            connection.execute(sa.delete(log.entries).where(log.entries.c.position >= before))

    store._publish = publish

    from coterie.cli.main import invoke

    return invoke(["serve", "thirdparty", *serving])


if __name__ == "__main__":
    sys.exit(main())
