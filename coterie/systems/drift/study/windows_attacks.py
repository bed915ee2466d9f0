r"""Attacks of the COS on DRIFT's shielded form, by the windows in its transcript of a run.

They are the attacks on the published form (`published_attacks`), with the input that is left.  No
message names users and items together, so instead of *requested rows* there is only which rows a window touches.  A
row's gradient is still a combination of the rows :math:`v_u` of the users behind it, but the COS has no
:math:`v_u` to solve with: instead of *direction and sign* it can look for parallel rows in one vector, since rows of a
single user are parallel.

Under a sum in clear every owner's vector is read; under masks the sums are read, which follow from the versions of the
model that the COS sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coterie.privacy.attacks.cluster import cluster
from coterie.privacy.attacks.rounds_view import RoundView
from coterie.privacy.attacks.scoring import Truth, mean_auc, with_popularity
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import TranscriptEntry, decode, message_class, read_transcript
from coterie.secure_sum.contribution import Layout, Segment
from coterie.wire.refusal import Refusal
from coterie.wire.tensor import from_wire
from coterie.wire.v1.orchestrator_pb2 import FetchResponse, Model, RunPlan, SubmitKind, SubmitRequest
from coterie.wire.v1.rounds_pb2 import SummedVector

__all__ = ["DirectionsReport", "TouchedReport", "Window", "WindowReport", "read_windows", "report"]

_MOST_CLUSTERED = 200
"""Windows in which directions are looked for: the work grows with the square of the items."""

FactorRows = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Window:
    """Item gradients that the COS learned from one window, of an owner or of a sum.

    Attributes
    ----------
    number : int
        Number of the window; under masks the version of the model after it.
    owner : int
        Slot of the data owner; -1 for a sum over several.
    gradient : ndarray of float32, shape (I, d)
    step : float
        Difference of two neighbouring values after rounding; 0 where it is not known.
    """

    number: int
    owner: int
    gradient: FactorRows
    step: float

    @property
    def touched(self) -> npt.NDArray[np.bool_]:
        """Rows whose gradient is not zero, bool (I,)."""
        return np.asarray(self.gradient.any(axis=1))


class TouchedReport(TypedDict):
    """Accuracy of guessing which items users interacted with, from the rows that windows touch.

    Nothing tells whose rows they are: every user gets the same scores.
    """

    auc: float | None
    auc_with_popularity: float | None
    popularity_auc: float | None
    users: int
    pairs: int
    windows: int


class DirectionsReport(TypedDict):
    """Accuracy of guessing which items users interacted with, from rows that are parallel.

    ``traced`` is the share, of ``rows`` released rows that were examined, that lie in a single user's direction,
    without telling which user's.
    """

    auc: float | None
    auc_with_popularity: float | None
    popularity_auc: float | None
    traced: float | None
    rows: int


class WindowReport(TypedDict):
    """Report of both attacks, ready for JSON."""

    requested_rows: TouchedReport
    gradient_sign: DirectionsReport


def report(transcripts: Iterable[Path | str], truth: Truth, plan: RunPlan) -> WindowReport:
    """Attack a run by the messages that the COS received and sent.

    Parameters
    ----------
    transcripts : iterable of Path
        Transcripts of the COS, oldest first.
    truth : Truth
        Interactions of users, by slot and by index in the catalogue; used to judge the guesses only.
    plan : RunPlan
        The run's plan.

    Returns
    -------
    WindowReport
        AUCs are means over users, with that of an attacker who knows only item popularity.
    """
    windows = list(read_windows(transcripts, plan))
    seen = np.zeros(truth.n_items, np.float32)
    single = np.zeros(truth.n_items, np.float32)
    rows = traced = 0
    every = max(len(windows) // _MOST_CLUSTERED, 1)
    for number, window in enumerate(windows):
        n_items = min(len(window.gradient), truth.n_items)
        seen[:n_items] += window.touched[:n_items]
        if number % every or not window.touched.any():
            continue
        found = cluster(RoundView(window.number, np.array([0]), rows=window.gradient, noise=window.step / 2))
        rows += int(found.touched.sum())
        traced += int(found.explained.sum())
        single[:n_items] += found.explained[:n_items]
    consumed, popularity = truth.consumed(), truth.popularity()
    popularity_auc, users = mean_auc(popularity, consumed)

    def aucs(scores: FactorRows) -> tuple[float | None, float | None]:
        return (
            mean_auc(scores.astype(np.float64), consumed)[0],
            mean_auc(with_popularity(scores, popularity), consumed)[0],
        )

    touched, directions = aucs(seen), aucs(single)
    return WindowReport(
        requested_rows=TouchedReport(
            auc=touched[0],
            auc_with_popularity=touched[1],
            popularity_auc=popularity_auc,
            users=users,
            pairs=int(consumed.sum()),
            windows=len(windows),
        ),
        gradient_sign=DirectionsReport(
            auc=directions[0],
            auc_with_popularity=directions[1],
            popularity_auc=popularity_auc,
            traced=traced / rows if rows else None,
            rows=rows,
        ),
    )


def read_windows(transcripts: Iterable[Path | str], plan: RunPlan) -> Iterator[Window]:
    """Read the windows of a run, in the order of their arrival.

    Parameters
    ----------
    transcripts : iterable of Path
        Transcripts of the COS, oldest first.
    plan : RunPlan

    Yields
    ------
    Window
        Under a sum in clear one for each owner and window; under masks one for each version of the model.
    """
    masked = plan.secure_sum == "masked"
    reading = _Versions(plan) if masked else _Vectors(plan)
    for path in transcripts:
        for entry in read_transcript(path):
            if entry.side == "server" and message_class(entry) is reading.carrier:
                try:
                    window = reading.take(entry)
                except (DecodeError, Refusal):
                    # The COS refused a message that it could not read, and learned nothing from it.
                    continue
                if window is not None:
                    yield window


class _Vectors:
    """Reader of the vectors that owners submitted in clear."""

    carrier = SubmitRequest

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._settings = _settings(plan)
        self._assembly = Assembly()
        self._seen: set[tuple[int, int]] = set()

    def take(self, entry: TranscriptEntry) -> Window | None:
        message = decode(entry)
        if not isinstance(message, SubmitRequest) or not message.HasField("chunk"):
            return None
        whole = self._assembly.add(entry, message, message.chunk)
        if whole is None or not isinstance(whole.first, SubmitRequest):
            return None
        first = whole.first
        key = first.round.round, first.slots[0].first if first.slots else -1
        if (
            first.kind != SubmitKind.SUBMIT_KIND_VECTOR
            or first.round.run_id != self._plan.run_id
            or not entry.peer.startswith("data-owner/")
            or key in self._seen
        ):
            return None
        self._seen.add(key)
        codes = np.frombuffer(SummedVector.FromString(bytes(whole.data)).codes, "<u4")
        bound, bits = self._settings
        shape = (len(codes) // self._plan.dim, self._plan.dim)
        layout = Layout((Segment("gradient", shape, bound, bits),))
        gradient = layout.decode(codes.astype(np.uint32), 1)["gradient"].astype(np.float32)
        return Window(*key, gradient, layout["gradient"].step)


class _Versions:
    """Reader of the steps between the versions of the model that the COS sent."""

    carrier = FetchResponse

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        bound, bits = _settings(plan)
        self._step = Segment("gradient", (1,), bound, bits).step
        self._assembly = Assembly()
        self._last: tuple[int, FactorRows] | None = None

    def take(self, entry: TranscriptEntry) -> Window | None:
        message = decode(entry)
        if not isinstance(message, FetchResponse) or not message.HasField("chunk"):
            return None
        whole = self._assembly.add(entry, message, message.chunk)
        if whole is None:
            return None
        tensors = {one.name: one.tensor for one in Model.FromString(bytes(whole.data)).tensors}
        if tensors.keys() != {"items", "version"}:
            return None
        version = int(from_wire(tensors["version"], np.float32, (1,), field="version")[0])
        items = from_wire(tensors["items"], np.float32, (None, self._plan.dim), field="items")
        before, self._last = self._last, (version, items)
        if before is None or before[0] >= version:
            self._last = before or self._last
            return None
        shared = len(before[1])
        gradient = (before[1] - items[:shared]) / np.float32(self._plan.rate)
        # Unchanged rows give exact zeros, as both versions hold the same numbers.
        return Window(version, -1, gradient, self._step + float(np.abs(items).max(initial=0)) * 2.0**-22)


def _settings(plan: RunPlan) -> tuple[float, int]:
    plain = json.loads(plan.settings)
    return float(plain["bound"]), int(plain["bits"])
