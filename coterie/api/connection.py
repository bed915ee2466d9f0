"""A federation that already stands, on any machines, from Python: what ``coterie operate`` does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.api.data import DataSplit
from coterie.api.recommenders import FederatedRecommender
from coterie.api.report_page import ReportPage, metrics_frame, tell
from coterie.api.waiting import awaited
from coterie.config.key_paths import toml_text
from coterie.config.load import load
from coterie.config.operate import OperateSettings
from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.launch.operation import operate
from coterie.launch.order import Order
from coterie.telemetry.report import Report
from coterie.wire.v1 import operator_pb2 as wire

if TYPE_CHECKING:
    import polars as pl

__all__ = ["FederationConnection", "OperatedRun", "connect"]


class OperatedRun:
    """A finished run of a federation on other machines: the operator has its figures, and no model and no data.

    Attributes
    ----------
    folder : Path
        Folder of the report.
    """

    def __init__(self, report: Report, folder: Path) -> None:
        self._report = report
        self.folder = folder

    @property
    def report(self) -> ReportPage:
        """The report, with its page."""
        return ReportPage(self._report, self.folder / "report.html")

    @property
    def metrics(self) -> pl.DataFrame:
        """Metrics of the run, and of its reference rows, by row."""
        return metrics_frame(self._report)

    def __repr__(self) -> str:
        return f"OperatedRun({self._report.run_id})"


class FederationConnection:
    """The operator's side of a federation that `connect` has found: its order, and how to carry it out.

    Attributes
    ----------
    settings : RunSettings
        The run that the order describes.
    run_id : str
    """

    def __init__(self, settings: OperateSettings, order: Order) -> None:
        self._settings = settings
        self._order = order

    @property
    def settings(self) -> RunSettings:
        """Settings of the run that was prepared."""
        return self._order.settings

    @property
    def run_id(self) -> str:
        """Id of the run that was prepared."""
        return self._order.run_id

    async def start(
        self,
        model: FederatedRecommender | None = None,
        split: DataSplit | None = None,
        *,
        resume: bool = False,
        progress: bool = False,
    ) -> OperatedRun:
        """Start the prepared run, wait for its end, and return its figures.

        Parties have the data and consent to one plan, so the run is the one that ``coterie bootstrap`` prepared.

        Parameters
        ----------
        model : FederatedRecommender, optional
            Refused unless its keys are those of the prepared run.
        split : DataSplit, optional
            Refused unless it is the split of the prepared run, by its hash.
        resume : bool
            Whether the run has failed before, and is resumed.
        progress : bool
            Whether each evaluation is printed on standard error.

        Raises
        ------
        ConfigError
            The model or the split is another than that of the prepared run.
        RunError
            The run ended without a result, or the orchestration server cannot be reached.
        CertificateError, PeerError
            The operator cannot enrol, or is refused.
        """
        self._require_prepared(model, split)
        shown = self._order.settings.description.shown

        def see(event: wire.WatchRunResponse) -> None:
            if progress and event.HasField("metrics"):
                tell(self._order.seed, event.metrics, shown)

        def told(text: str) -> None:
            print(text, file=sys.stderr)

        report = await operate(self._settings, self._order, see, resume=resume, told=told)
        return OperatedRun(report, self._settings.output)

    def run(
        self,
        model: FederatedRecommender | None = None,
        split: DataSplit | None = None,
        *,
        resume: bool = False,
        progress: bool = False,
    ) -> OperatedRun:
        """Do as `start`, and wait; also where an event loop runs, as in a notebook.

        An interrupt ends the watching, and the run goes on: a further call watches it again.
        """

        async def work() -> OperatedRun:
            return await self.start(model, split, resume=resume, progress=progress)

        return awaited(work)

    def _require_prepared(self, model: FederatedRecommender | None, split: DataSplit | None) -> None:
        prepared = self._order.settings
        if model is not None:
            if not isinstance(model, FederatedRecommender):
                raise ConfigError(f"{model!r}: expected a federated system, such as ct.FedNCF()")
            _require_same(model.tree(), prepared, self.run_id)
        if split is not None and (found := split.sha256) != self._order.split_sha256:
            raise ConfigError(
                f"the split has SHA-256 {found}, and that of the prepared run {self.run_id} is "
                f"{self._order.split_sha256}; expected the same",
                hint="`coterie bootstrap` prepares a federation for other data",
            )

    def __repr__(self) -> str:
        return f"FederationConnection({self.run_id}: {self._order.settings.system})"


def _require_same(keys: dict[str, Any], prepared: RunSettings, run_id: str) -> None:
    """Check that keys of a model have the values of a prepared run; the run's name may differ."""
    wanted = RunSettings.model_validate({**keys, "name": prepared.name})
    for name in keys:
        if name == "name":
            continue
        ours, theirs = getattr(wanted, name), getattr(prepared, name)
        given = keys[name] if isinstance(keys[name], dict) else {}
        pairs = [(f"{name}.{one}", getattr(ours, one), getattr(theirs, one)) for one in given] or [
            (name, ours, theirs)
        ]
        for key, value, other in pairs:
            if value != other:
                raise ConfigError(
                    f"{key} = {value!r}: the prepared run {run_id} has {other!r}",
                    hint="parties consent to one plan; `coterie bootstrap` prepares a federation for another",
                )


def connect(config: str | Path, **keys: Any) -> FederationConnection:
    """Return the connection to a federation that stands, by the operator's configuration.

    Nothing is called before a run is started.

    Parameters
    ----------
    config : str or Path
        The operator's ``config.toml``, as ``coterie bootstrap`` writes it.
    **keys
        Keys of that file that have another value, as ``output="reports"``.

    Raises
    ------
    ConfigError
        The file cannot be read or has wrong keys, or the order that it names is missing.
    """
    path = Path(config)
    sets = [f"{name}={toml_text(value)}" for name, value in keys.items()]
    settings = load(OperateSettings, path, sets=sets, relative_to=path.parent).settings
    return FederationConnection(settings, Order.load(settings.order))
