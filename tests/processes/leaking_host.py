"""A real client host with a leak: ``coterie serve client``, which tells two items of its first user.

    python -P -m tests.processes.leaking_host {log,metric,name} --config FILE [--set KEY=VALUE]

Everything but the leak is the service's own code.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie_client import service
from coterie_client.history import read_histories

from coterie.config.run import RunSettings
from coterie.config.services import ClientSettings
from coterie.crypto.identity import Bundle, Identity
from coterie.launch.parties import Laid
from coterie.parties.party import Registrant
from coterie.process.runtime import Runtime
from coterie.studies.run_data import Feed
from coterie.telemetry.gauges import PrometheusMetric

from .programs import ProgramChild
from .running import Running


class Leaking(Running):
    """A federation of real processes whose hosts leak.

    Parameters
    ----------
    leaks : mapping of str to str
        Leak by host.
    """

    def __init__(
        self, settings: RunSettings, feed: Feed, folder: Path, leaks: Mapping[str, str], **options: Any
    ) -> None:
        super().__init__(settings, feed, folder, **options)
        self._leaks = leaks

    def _configure(self) -> Laid:
        laid = super()._configure()
        for party, leak in self._leaks.items():
            honest = self.children[party]
            self.children[party] = ProgramChild(
                honest.role, honest.name, honest.folder, program=["tests.processes.leaking_host", leak]
            )
        return laid


def build(leak: str, settings: ClientSettings, runtime: Runtime) -> service.ClientProcess:
    """Build the service with a leak."""
    assert settings.histories is not None
    _, interactions = read_histories(settings.histories)
    two = sorted(one.item for one in interactions if one.user == 1)[:2]
    match leak:
        case "log":
            for item in two:
                service._log.info("stored", item=item)
        case "metric":
            counted = dict.fromkeys(((item,) for item in two), 1.0)
            runtime.measures.append(
                PrometheusMetric("coterie_stored", "Items stored.", lambda: counted, labels=("item",))
            )
        case "name":
            users = service.HostedUsers

            def named(identities: Sequence[Identity], bundles: Sequence[Bundle]) -> list[Registrant]:
                return [
                    Registrant(one.identity, one.bundle, one.kind, name=" ".join(two))
                    for one in users(identities, bundles)
                ]

            service.HostedUsers = named  # type: ignore[assignment, misc]
    return service.ClientProcess(settings, runtime)


def main() -> int:
    """Serve with the leak of the command line, and return the exit status."""
    leak, *serving = sys.argv[1:]
    service.SERVICE.build = functools.partial(build, leak)  # type: ignore[method-assign]

    from coterie.cli.main import invoke

    return invoke(["serve", "client", *serving])


if __name__ == "__main__":
    sys.exit(main())
