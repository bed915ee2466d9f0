"""Runs of federated systems from Python: training, figures, recommendations, receipts, attacks, the report."""

from __future__ import annotations

import datetime
import html
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.api.data import DataSplit
from coterie.api.finished_model import FinishedModel, model_of
from coterie.api.fitted import FittedModel, places, recommendations
from coterie.api.frames import records_frame
from coterie.api.report_page import ReportPage, metrics_frame, tell
from coterie.api.waiting import awaited
from coterie.config.run import RunSettings
from coterie.errors import ConfigError, RunError
from coterie.launch import local_run
from coterie.launch.federation import run_federation
from coterie.launch.fork_server import fork_server
from coterie.launch.kept_hosts import HostScores, kept_hosts
from coterie.launch.released_model import released
from coterie.studies import experiment, recorded_run
from coterie.studies.in_process import InProcess
from coterie.studies.run_data import Feed
from coterie.studies.run_plan import new_run_id
from coterie.studies.services_run import FinishedRun
from coterie.telemetry.report import Report
from coterie.wire.v1 import operator_pb2 as wire

if TYPE_CHECKING:
    import polars as pl

__all__ = ["FederatedRun", "Receipt", "train"]

_SENT = ("recipient", "kind", "protection", "count", "bytes", "first", "last")
_REFUSED = ("recipient", "reason", "count", "first", "last")


@dataclass(frozen=True)
class _Ended:
    """One seed's federation after its end."""

    seed: int
    feed: Feed
    made: FinishedRun | InProcess


@dataclass(frozen=True)
class Receipt:
    """What has left a user's host about the user, and what the host refused.

    Attributes
    ----------
    user : str
    sent : polars.DataFrame
        Columns recipient, kind, protection, count, bytes, first and last (UTC).
    refused : polars.DataFrame
        Columns recipient, reason, count, first and last.
    """

    user: str
    sent: pl.DataFrame = field(repr=False)
    refused: pl.DataFrame = field(repr=False)

    def __str__(self) -> str:
        return f"Receipt of {self.user}\n{self.sent}\nrefused: {len(self.refused)}"

    def _repr_html_(self) -> str:
        return (
            f"<p>Receipt of {html.escape(self.user)}</p>{self.sent._repr_html_()}"
            f"<p>Refused</p>{self.refused._repr_html_()}"
        )


class FederatedRun(FittedModel):
    """A finished run, as `FederatedRecommender.fit` returns it.

    With several seeds, recommendations, receipts and attacks are those of the first.

    Attributes
    ----------
    settings : RunSettings
    folder : Path
        Folder of the run: stores, logs and report.
    split : DataSplit
    """

    def __init__(
        self, settings: RunSettings, split: DataSplit, report: Report, folder: Path, ended: _Ended
    ) -> None:
        self.settings = settings
        self.split = split
        self.folder = folder
        self._report = report
        self._ended = ended

    @property
    def in_process(self) -> bool:
        """Whether the run was trained in this process, without services."""
        return isinstance(self._ended.made, InProcess)

    @property
    def report(self) -> ReportPage:
        """The report, with its page."""
        return ReportPage(self._report, self.folder / "report.html")

    @property
    def metrics(self) -> pl.DataFrame:
        """Figures of the run and of each baseline beside it; with several seeds, means and standard deviations."""
        return metrics_frame(self._report)

    @property
    def history(self) -> pl.DataFrame:
        """Figures of each evaluation while the first seed was trained, in order."""
        entries = (
            {"epoch": one.epoch, "version": one.version, **one.metrics} for one in self._report.history
        )
        return records_frame(entries, ("epoch", "version"))

    def score(self, users: Sequence[str], items: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Return scores of items for users, by their private state and the chosen model, as their hosts compute them.

        Over services model and private state are read from the run's folder, and nothing is started.

        Raises
        ------
        RunError
            The model is sealed for the participants, or not one of rounds; or the run's folder is not whole.
        DataError
            There is no such user or item.
        """
        of_users, chosen = places(self.split, users, items)
        dataset, feed = self.split.data.dataset, self._ended.feed
        place = {key: at for at, key in enumerate(feed.dataset.items)}
        columns = np.array([place[dataset.items[one]] for one in chosen.tolist()], np.intp)
        return self.host_scores.of(of_users)[:, columns]

    def recommend(self, users: str | Sequence[str], k: int = 10) -> pl.DataFrame:
        """Recommend items that users have not had in training; `FittedModel.recommend` has the columns.

        The best ones by `score`.  Where the run's model is sealed or not one of rounds, each user's own host is asked:
        third party, server and the hosts concerned are started from their stores once for all users of a call, and
        stopped.

        Raises
        ------
        ConfigError
            ``k`` is out of range.
        DataError
            There is no such user.
        RunError, PeerError
            The run's folder is not whole; a service cannot be started, or refuses.
        """
        names = [users] if isinstance(users, str) else list(users)
        of_users, _ = places(self.split, names)
        if self._gives_model:
            return recommendations(self._ended.feed, names, self.host_scores.of(of_users), k)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"k is {k!r}; expected a whole number of at least 1")
        return self._asked(names, k)

    def _asked(self, names: Sequence[str], k: int) -> pl.DataFrame:
        """Ask the users' own hosts."""
        found: dict[str, local_run.Recommendation] = {}

        def answered(one: local_run.Recommendation) -> None:
            found[one.user] = one

        run = local_run.LocalRun.at(self.folder)
        awaited(lambda: local_run.recommend_to_all(run, k, answered, names))
        dataset = self.split.data.dataset
        titles = (
            {} if dataset.item_titles is None else dict(zip(dataset.items, dataset.item_titles, strict=True))
        )
        rows = (
            {
                "user": name,
                "rank": one.rank,
                "item": one.item,
                "title": titles.get(one.item),
                "score": one.score,
            }
            for name in names
            for one in found[name].suggestions
        )
        return records_frame(rows, ("user", "rank", "item", "title", "score"))

    def receipt(self, user: str) -> Receipt:
        """Return a user's disclosure receipt, from its host, which is started from its store for it.

        Raises
        ------
        RunError
            The run was in process, where nothing leaves a host.
        DataError
            There is no such user.
        """
        places(self.split, [user])
        if self.in_process:
            raise RunError(
                f"run {self._report.run_id} was in one process: no host sent anything, so there is no receipt",
                hint="fit(...) without in_process trains over services",
            )
        run = local_run.LocalRun.at(self.folder)
        answer = awaited(lambda: local_run.receipt(run, user))
        sent = [_with_times(one, _SENT) for one in answer.disclosures]
        refused = [_with_times(one, _REFUSED) for one in answer.declined]
        return Receipt(user, records_frame(sent, _SENT), records_frame(refused, _REFUSED))

    def attack(self) -> pl.DataFrame:
        """Return what attacks on everything that the server received find, a row for each attack.

        Raises
        ------
        ConfigError
            The run recorded no messages.
        """
        figures: Mapping[str, Any] = self._report.content().get("attacks") or {}
        if not figures:
            made = self._ended.made
            if not isinstance(made, FinishedRun) or not self.settings.federation.transcripts:
                raise ConfigError(
                    f"run {self._report.run_id} recorded no messages, so there is nothing to attack",
                    hint="federation={'transcripts': True} of the model records them, in runs over services",
                )
            figures = recorded_run.attack(self.settings, made, self._ended.feed)
        return records_frame(({"attack": name, **found} for name, found in figures.items()), ("attack",))

    @cached_property
    def model(self) -> FinishedModel:
        """The chosen model, which also serves people who never took part.

        Raises
        ------
        RunError
            The system's model is not one of rounds, or is sealed for the participants.
        """
        return model_of(self.settings, self._report, self._ended.made, self.folder)

    def save(self, folder: str | Path) -> Path:
        """Write the chosen model into a folder, which `coterie.load_model` reads, and return the folder."""
        return self.model.save(folder)

    @property
    def _gives_model(self) -> bool:
        """Whether model and hosts can be had here: always in process, over services unless it is sealed."""
        return self.in_process or (
            self.settings.description.in_rounds and self.settings.secure_sum != "shared-key"
        )

    @cached_property
    def host_scores(self) -> HostScores:
        """Scores by the hosts' sides and the chosen model, without anything else of the run; `score` has the errors."""
        made, feed, hosts = self._ended.made, self._ended.feed, self.settings.federation.hosts
        if isinstance(made, InProcess):
            made.restore()
            return HostScores.in_process(feed, hosts, made.hosts, made.model(), made.items)
        run = local_run.LocalRun.at(self.folder)
        final = released(run)
        return HostScores.over_services(feed, kept_hosts(run, final), final)

    def __repr__(self) -> str:
        way = "in process" if self.in_process else "over services"
        return f"{self._report.label} on {self.split!r}, {way}: {self.folder}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.metrics._repr_html_()}"


def train(
    settings: RunSettings, split: DataSplit, *, in_process: bool, progress: bool = False
) -> FederatedRun:
    """Train a federation on a split and wait for its end.

    Parameters
    ----------
    settings : RunSettings
    split : DataSplit
        The split of the settings' seed.
    in_process, progress : bool
        As for `FederatedRecommender.fit`.
    """
    run_id = new_run_id(settings.name)
    if split.data.in_memory:
        kept = split.tree((settings.output / run_id).absolute())["data"]
        named = {name: kept[name] for name in ("path", "layout")}
        settings = settings.model_copy(update={"data": settings.data.model_copy(update=named)})
    if not in_process:
        fork_server()
    ended: list[_Ended] = []

    async def work() -> tuple[Report, Path]:
        def see(seed: int, event: wire.WatchRunResponse) -> None:
            if progress and event.HasField("metrics"):
                tell(seed, event.metrics, settings.description.shown)

        def finished(seed: int, feed: Feed, made: FinishedRun | InProcess) -> None:
            if not ended:
                ended.append(_Ended(seed, feed, made))

        return await experiment.run(
            settings,
            run_id,
            see,
            None if in_process else run_federation,
            warn=lambda text: warnings.warn(text, stacklevel=2),
            dataset=split.data.dataset,
            finished=finished,
        )

    report, folder = awaited(work)
    return FederatedRun(settings, split, report, folder, ended[0])


def _with_times(one: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return a line of a receipt by column; first and last as times in UTC."""

    def value(name: str) -> Any:
        if name in ("first", "last"):
            return datetime.datetime.fromtimestamp(getattr(one, f"{name}_ms") / 1e3, datetime.UTC)
        return getattr(one, name)

    return {name: value(name) for name in names}
