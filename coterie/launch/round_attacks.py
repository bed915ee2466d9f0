"""The attacks on a run in rounds: the server's transcript is replayed, and its sums are attacked.

The replay takes what the orchestration server received, in order, through the same machine that the server ran.  So
the attacker has each contribution in clear as it came, and of masked ones exactly the sums that were revealed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coterie.errors import StoreError
from coterie.learning.ncf import Architecture, gradients
from coterie.privacy.attacks import cluster, differencing, disaggregate, inversion
from coterie.privacy.attacks.rounds import RoundView, view_of_sum
from coterie.privacy.attacks.scoring import Truth
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import Entry, decode, message_class, read_transcript
from coterie.rounds import cos as machine
from coterie.rounds.cos import Phase, RoundState
from coterie.rounds.fedncf import FedNcfPlan
from coterie.rounds.systems import server_half, server_side
from coterie.rounds.training import Purpose
from coterie.secure_sum.codes import codes_of
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, Step
from coterie.secure_sum.steps import STEP_OF_KIND
from coterie.wire.layout import Layout
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.orchestrator_pb2 import FetchResponse, RunPlan, SubmitRequest

__all__ = ["report", "views"]

_LATER = 1e9
"""A time at which every step has taken too long."""


def report(transcripts: Sequence[Path], truth: Truth, plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Attack the server's transcript of a run of FedNCF.

    Returns
    -------
    dict
        ``disaggregate``, ``cluster``, ``differencing`` and ``inversion``, each as its module describes; the last is
        left out where SciPy is not installed (``coterie[attacks]``).
    """
    settings = FedNcfPlan.from_json(plan.settings)
    seen, begun = [], []
    for one in _received(transcripts, plan, settings, truth.n_items):
        seen.append(_view(one, settings))
        if not one.version:
            begun.append(one)
    trained = [view for view in seen if view.rows is not None]
    found: dict[str, dict[str, Any]] = {
        "disaggregate": dict(disaggregate.report(seen, truth)),
        "cluster": dict(cluster.report(trained, truth)),
        "differencing": dict(differencing.report(trained, truth)),
    }
    if find_spec("scipy") is not None:
        found["inversion"] = dict(inversion.report(_updates(begun, plan, settings, truth.n_items), truth))
    return found


def views(transcripts: Sequence[Path], plan: RunPlan, n_items: int) -> Iterator[RoundView]:
    """Yield what the server learned in each round: single contributions in clear, or the sums that were revealed.

    Parameters
    ----------
    transcripts : sequence of Path
        Of the server, oldest first.
    plan : RunPlan
        Of a run of FedNCF.
    n_items : int
        Items of its catalogue.
    """
    settings = FedNcfPlan.from_json(plan.settings)
    for received in _received(transcripts, plan, settings, n_items):
        yield _view(received, settings)


@dataclass(frozen=True, eq=False)
class _Received:
    """One vector that the server learned: whose it is, and in which round."""

    plan: SumPlan
    layout: Layout
    slots: tuple[int, ...]
    codes: NDArray[np.uint32]
    version: int


def _received(
    transcripts: Sequence[Path], plan: RunPlan, settings: FedNcfPlan, n_items: int
) -> Iterator[_Received]:
    """Yield the vectors of all rounds but evaluations, oldest round first."""
    rounds = _rounds(itertools.chain.from_iterable(map(read_transcript, transcripts)))
    versions: dict[bytes, int] = {}
    for number in sorted(rounds):
        one = rounds[number]
        if one.plan is None or one.plan.purpose == Purpose.EVALUATE.value:
            continue
        version = versions.setdefault(one.plan.model_sha256, len(versions))
        layout = settings.layout(Purpose(one.plan.purpose), n_items)
        if plan.secure_sum == "clear":
            for slots, codes in one.contributions(layout.size):
                yield _Received(one.plan, layout, slots, codes, version)
            continue
        state = RoundState.begin(one.plan, layout, server_half(plan.secure_sum), 1.0)
        revealed = one.revealed(state)
        if revealed is not None:
            yield _Received(one.plan, layout, *revealed, version)


def _view(received: _Received, settings: FedNcfPlan) -> RoundView:
    width = settings.learning.architecture.gmf_width
    return view_of_sum(
        received.layout,
        received.codes,
        received.slots,
        received.version,
        # What is learned of items is parallel to the user's own row in the product part of the model only.
        columns=slice(0, width) if width else slice(None),
        touched="supports" if received.plan.purpose == Purpose.SUPPORTS.value else "touched",
    )


def _updates(
    begun: Iterable[_Received], plan: RunPlan, settings: FedNcfPlan, n_items: int
) -> Iterator[inversion.SentUpdate]:
    """Yield the updates of version 0, with which the run began, if each is one step on one batch.

    That version follows from the plan, and everybody has it.  Where rows are weighted by label
    (`coterie.learning.fedncf.balance`), with ``touch = "once"``, the attack as written here does not apply.
    """
    learning, rate = settings.learning, settings.learning.local_rate
    one_step = (learning.local_optimiser, learning.local_epochs, learning.batch_size) == ("sgd", 1, 0)
    if not one_step or learning.touch != "exact" or learning.aggregation != "mf-fedavg":
        return
    server = server_side(plan.system, plan.settings, n_items, plan.seed, 0)
    model = server.model(server.initial())
    gradient = _gradient(learning.architecture, model["items"], model["network"])
    for one in begun:
        if one.plan.purpose != Purpose.TRAIN.value:
            continue
        sums = one.layout.decode(one.codes, len(one.slots))
        instances = float(sums["instances"])
        if not instances:
            continue
        # Rows step against the summed loss of a participant, the network against the mean.
        by_rows, by_network = -len(one.slots) / (rate * instances), -1 / (rate * instances)
        yield inversion.SentUpdate(
            np.asarray(one.slots, np.int64),
            sums["items"] * by_rows,
            sums["network"] * by_network,
            gradient,
            bound=learning.user_bound,
            # Rounding up or down at random has a variance of at most a quarter of a step squared.
            noise=(-by_rows * one.layout["items"].step / 2, -by_network * one.layout["network"].step / 2),
        )


def _gradient(
    architecture: Architecture, items: NDArray[np.float32], network: NDArray[np.float32]
) -> inversion.BatchGradient:
    """Return the derivatives of the mean loss of distinct instances of one participant."""

    def gradient(
        user: NDArray[np.float64], batch: NDArray[np.int64], labels: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        n = len(batch)
        rows = np.ones((1, architecture.width + 1, n), np.float32)
        rows[0, :-1] = items[batch].T
        found = gradients(
            architecture,
            user.astype(np.float32)[None, :, None],
            rows,
            network,
            labels.astype(np.float32)[None],
            np.full((1, n), 1 / n, np.float32),
        )
        return found.rows[0].T.astype(np.float64), found.network[0].astype(np.float64)

    return gradient


@dataclass
class _Round:
    """What the server received in a round, in order, and the plan that it sent."""

    plan: SumPlan | None = None
    messages: list[tuple[Step, tuple[int, ...], bytes]] = field(default_factory=list)

    def contributions(self, size: int) -> Iterator[tuple[tuple[int, ...], NDArray[np.uint32]]]:
        """Yield each contribution in clear with its slots; the first where one was repeated."""
        seen: set[tuple[int, ...]] = set()
        for step, slots, message in self.messages:
            if step is Step.SUBMIT and slots and slots not in seen:
                try:
                    _, codes = codes_of(message, size)
                except Refusal:
                    continue
                seen.add(slots)
                yield slots, codes

    def revealed(self, state: RoundState) -> tuple[tuple[int, ...], NDArray[np.uint32]] | None:
        """Return whose contributions the revealed sum covers, and the sum; None when none was revealed."""
        members: dict[tuple[int, ...], int] = {}
        state, _ = machine.advance(state, machine.Opened(0.0))
        for step, slots, message in self.messages:
            member = members.get(slots, _advertised(message) if step is Step.ADVERTISE else None)
            if member is None:
                continue
            arrived = state
            try:
                while arrived.phase is Phase.COLLECT and _before(arrived, step):
                    # The server's clock closed the step; what was missing then stayed away.
                    arrived, _ = machine.advance(arrived, machine.Tick(_LATER))
                state, _ = machine.advance(arrived, machine.Arrived(member, step, message, 0.0))
            except Refusal:
                # Refused by the server as well, and no sign that it had closed anything.
                continue
            members[slots] = member
        if state.phase is Phase.COLLECT and state.step is Step.UNMASK:
            state, _ = machine.advance(state, machine.Tick(_LATER))
        if state.phase is not Phase.UNMASK or state.running is None:
            return None
        try:
            total = state.half.unmask(state.plan, state.closed, state.running)
        except Failed:
            return None
        covered = {member: slots for slots, member in members.items()}
        return tuple(slot for one in state.submitters for slot in covered[one]), total.codes


def _advertised(message: bytes) -> int | None:
    """Return the member for which an advertisement speaks; None when it cannot be read."""
    try:
        return rounds_pb2.Advert.FromString(message).member
    except DecodeError:
        return None


def _before(state: RoundState, step: Step) -> bool:
    steps = state.half.steps
    return steps.index(state.step) < steps.index(step)


def _rounds(entries: Iterable[Entry]) -> Mapping[int, _Round]:
    """Return what the entries of a transcript hold, round by round."""
    rounds: dict[int, _Round] = defaultdict(_Round)
    submitting = Assembly()
    for entry in entries:
        if message_class(entry) not in (SubmitRequest, FetchResponse):
            continue
        try:
            message = decode(entry)
        except StoreError:
            continue
        if isinstance(message, FetchResponse):
            _take_plan(rounds, message)
        elif isinstance(message, SubmitRequest):
            _take_message(rounds, submitting, entry, message)
    return rounds


def _take_message(
    rounds: dict[int, _Round], submitting: Assembly, entry: Entry, message: SubmitRequest
) -> None:
    """Note a member's message once it is whole."""
    try:
        whole = submitting.add(entry, message, message.chunk)
    except DecodeError:
        return
    if whole is None or not isinstance(whole.first, SubmitRequest):
        return
    head = whole.first
    step = STEP_OF_KIND.get(head.kind)
    if step is not None:
        slots = tuple(slot for one in head.slots for slot in range(one.first, one.first + one.count))
        rounds[head.round.round].messages.append((step, slots, bytes(whole.data)))


def _take_plan(rounds: dict[int, _Round], message: FetchResponse) -> None:
    """Note a plan that the server sent; plans are of one chunk unless the cohort is very large."""
    if not message.HasField("chunk") or message.chunk.offset or not message.chunk.last:
        return
    data = message.chunk.data
    try:
        plan = rounds_pb2.SumPlan.FromString(data)
        # Many bytes parse as many messages: a plan has no field that it does not know.
        plan.DiscardUnknownFields()
        if plan.ByteSize() == len(data):
            rounds[plan.round].plan = SumPlan.from_wire(plan)
    except (DecodeError, Refusal):
        return
