"""A real client host with a leak: ``coterie serve client``, which tells two items of its first user.

    python -P -m tests.processes.leaking_host {log,metric,name} --config FILE [--set KEY=VALUE]

Everything but the leak is the service's own code.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie_client import service
from coterie_client.history import read_histories

from coterie.config.run import RunSettings
from coterie.config.services import ClientSettings
from coterie.launch.children import Child
from coterie.launch.parties import Laid
from coterie.process.runtime import PARENT_VARIABLE, Runtime
from coterie.studies.run_data import Feed
from coterie.telemetry.gauges import PrometheusMetric

from .running import Running

ROOT = Path(__file__).parents[2]


@dataclass
class LeakingChild(Child):
    """The process of a host that leaks; ``arguments`` of its program come before those of ``coterie serve client``."""

    arguments: Sequence[str] = field(default=())

    def start(self, *sets: str) -> None:
        """Start the program, for the first time or after it has ended."""
        named = [f"--set={text}" for text in sets]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
        serving = [*named, "--config", str(self.folder / "config.toml")]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.processes.leaking_host", *self.arguments, *serving],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={**inherited, "PYTHONPATH": str(ROOT), PARENT_VARIABLE: str(os.getpid())},
            )


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
            self.children[party] = LeakingChild(honest.role, honest.name, honest.folder, arguments=[leak])
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
            named = functools.partial(service.Registrant, name=" ".join(two))
            service.Registrant = named  # type: ignore[assignment, misc]
    return service.ClientProcess(settings, runtime)


def main() -> int:
    """Serve with the leak of the command line, and return the exit status."""
    leak, *serving = sys.argv[1:]
    service.SERVICE.build = functools.partial(build, leak)  # type: ignore[method-assign]

    from coterie.cli.main import invoke

    return invoke(["serve", "client", *serving])


if __name__ == "__main__":
    sys.exit(main())
