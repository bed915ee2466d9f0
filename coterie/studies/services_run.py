"""Interface between studies and what runs a federation over services, which is `coterie.launch.federation`.

Studies ask for finished runs and never start a process: the command line hands them the function that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coterie.config.run import RunSettings
from coterie.studies.run_data import Feed
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["COS", "FinishedRun", "RunServices"]

COS = "cos/cos"
"""Name of the orchestration server among the parties of a run."""


@dataclass(frozen=True)
class FinishedRun:
    """A federation over services after all its processes have stopped.

    Attributes
    ----------
    plan : RunPlan
        The run's plan, as every participant received it.
    known : mapping
        The run's facts, as the COS reported them (``GetReport``).
    start_seconds : float
        Seconds until every process was started and the run created.
    accounts : mapping of str to mapping
        Account of each process that stopped in order, by party.
    states : mapping of str to Path
        State folder of each process, by party.
    """

    plan: RunPlan
    known: Mapping[str, Any]
    start_seconds: float
    accounts: Mapping[str, Mapping[str, Any]]
    states: Mapping[str, Path]


class RunServices(Protocol):
    """Function that runs one federation over services, from the first process to the last."""

    async def __call__(
        self,
        settings: RunSettings,
        feed: Feed,
        folder: Path,
        *,
        run_id: str,
        seed: int,
        see: Callable[[wire.WatchRunResponse], None],
    ) -> FinishedRun:
        """Run a federation.

        Parameters
        ----------
        settings : RunSettings
        feed : Feed
            The data, divided.
        folder : Path
            Folder of this federation, with one folder per process.
        run_id : str
        seed : int
        see : callable
            Receives each event.

        Raises
        ------
        RunError
            When a process ends by itself or the run cannot be followed.
        """
        ...
