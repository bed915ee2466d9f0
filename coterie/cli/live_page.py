"""The live page beside a command: a server for as long as the command runs, and nothing without ``--watch``."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.config.base import Peer
    from coterie.config.page import PageSettings
    from coterie.config.run import RunSettings
    from coterie.net.credentials import TlsFiles
    from coterie.telemetry.report import Report
    from coterie.web.live_run import LiveRun
    from coterie.web.run_actions import RunActions
    from coterie.wire.v1.operator_pb2 import WatchRunResponse

__all__ = ["RunPage", "live_page", "page_settings"]

_LINK_S = 24 * 3600.0
"""How long the printed link can be used, seconds: a run may take long before somebody looks at it."""
_MEASURE_S = 2.0
_LIST_EVERY = 15


class _Started(Protocol):
    def processes(self) -> list[tuple[str, int]]: ...
    def operator_access(self) -> tuple[TlsFiles, Peer]: ...
    async def stop_run(self, reason: str) -> None: ...


class RunPage:
    """What a command tells of its run; nothing happens without a live page.

    Parameters
    ----------
    live : LiveRun, optional
        The parts of the page.
    actions : RunActions, optional
        What the page may do to the run.
    folder : Path, optional
        Folder whose finished runs are listed.
    """

    def __init__(
        self, live: LiveRun | None = None, actions: RunActions | None = None, folder: Path | None = None
    ) -> None:
        self._live, self.actions, self._folder = live, actions, folder
        self._federation: _Started | None = None

    def update(self, seed: int, event: WatchRunResponse) -> None:
        """Show one event."""
        if self._live is not None:
            self._live.update(seed, event)

    def stage(self, text: str, settings: RunSettings | None = None) -> None:
        """Show what begins."""
        if self._live is not None:
            self._live.stage(text, settings)
        if self.actions is not None:
            self.actions.offer()

    def follow(self, federation: _Started) -> None:
        """Show CPU and memory of a federation's processes from now on, and let the page stop its run."""
        self._federation = federation
        if self.actions is not None:

            async def stop(reason: str) -> None:
                await federation.stop_run(f"stopped from the operator's page: {reason or 'no reason given'}")

            async def measure() -> None:
                from coterie.launch.latency import round_trips

                self.show_network(*await round_trips(*federation.operator_access()))

            self.actions.offer(stop=stop, measure=measure)

    def ended(self, report: Report, path: Path) -> None:
        """Show the result, and the run among the finished ones."""
        if self._live is not None:
            self._live.ended(report, str(path))
            self.list_runs()

    def failed(self, message: str) -> None:
        """Show that the run has failed."""
        if self._live is not None:
            self._live.failed(message)

    def goes_on(self) -> None:
        """Show that the run goes on after a failure."""
        if self._live is not None:
            self._live.goes_on()

    def show_network(self, pairs: Sequence[Mapping[str, Any]], without: Sequence[Mapping[str, Any]]) -> None:
        """Show median round trips between services."""
        if self._live is not None:
            self._live.network(pairs, without)

    def list_runs(self) -> None:
        """Show the finished runs of the folder."""
        from coterie.launch.dashboard import found_rows

        if self._live is not None and self._folder is not None:
            self._live.list_runs(found_rows(self._folder)[::-1])

    def show_runs(self, runs: list[Mapping[str, Any]]) -> None:
        """Show the runs of a federation."""
        if self._live is not None:
            self._live.list_runs(runs)

    def processes(self) -> list[tuple[str, int]]:
        """Return party and process id of the command and of the processes that it started."""
        started = [] if self._federation is None else self._federation.processes()
        return [("this command", os.getpid()), *started]


def page_settings(*, watch: bool, file: Path | None) -> PageSettings | None:
    """Return the settings of a page, from a file if one is given; None without a page.

    Raises
    ------
    ConfigError
        The file cannot be used.
    """
    if not watch and file is None:
        return None
    from coterie.config.load import load
    from coterie.config.page import PageSettings

    return PageSettings() if file is None else load(PageSettings, file, relative_to=file.parent).settings


@contextlib.contextmanager
def live_page(
    output: Output,
    paged: PageSettings | None,
    settings: RunSettings,
    run_id: str,
    headline: str,
    folder: Path | None,
    *,
    references: Mapping[str, Mapping[str, float]] | None = None,
    required: bool = False,
) -> Iterator[RunPage]:
    """Serve the live page of a run, and say how it is opened; without settings of a page, yield one that shows nothing.

    Where the packages of pages are not installed, that costs the page and not the run.

    Parameters
    ----------
    output : Output
    paged : PageSettings or None
    settings : RunSettings
    run_id, headline : str
    folder : Path or None
        Folder whose finished runs are listed; None where the command lists runs itself.
    references : mapping, optional
        Metrics of each baseline that is known beforehand, by its name.
    required : bool
        Whether missing packages are an error.

    Raises
    ------
    ConfigError
        The page is opened to other machines without TLS or without passwords.
    PreflightError
        The page's address cannot be bound, or a package is missing that is required.
    """
    if paged is None:
        yield RunPage()
        return
    from coterie.errors import CoterieError, PreflightError
    from coterie.web.board import Board
    from coterie.web.live_run import LiveRun
    from coterie.web.run_actions import RunActions
    from coterie.web.server import PageServer, require_packages

    try:
        require_packages()
    except PreflightError as error:
        if required:
            raise
        output.say(f"warning: no live page: {error.message} ({error.hint})")
        yield RunPage()
        return
    board = Board()
    actions = RunActions(board)
    live = LiveRun(board, settings, run_id, headline, references=references)
    page = RunPage(live, actions, folder)
    over = threading.Event()

    def look() -> None:
        times = 0
        while True:
            live.measure(page.processes)
            if times % _LIST_EVERY == 0:
                page.list_runs()
            times += 1
            if over.wait(_MEASURE_S):
                return

    looking = threading.Thread(target=look, name="live page", daemon=True)
    with PageServer(board, page="live", settings=paged, routes=actions.routes()) as server:
        output.say(f"live page: {server.link(_LINK_S)}")
        looking.start()
        try:
            yield page
        except KeyboardInterrupt:
            live.failed("the command was interrupted")
            raise
        except CoterieError as error:
            live.failed(error.message)
            raise
        finally:
            over.set()
            looking.join(_MEASURE_S)
