"""Rounds-based runs in one process (``--in-process``): the services' state machines without network and faults.

A run's numbers are those that the services come to with the same seed, and its report has the same keys.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coterie.config.run import EncryptionSettings, RunSettings
from coterie.crypto.beacon import BEACON_BYTES
from coterie.crypto.identity import Bundle, Identity, countersign
from coterie.crypto.verified import Verified
from coterie.data.keyed_order import key_hash
from coterie.errors import RunError
from coterie.rounds import privacy
from coterie.rounds.conductor import Conductor, aggregation_of, new_training
from coterie.rounds.model_state import OpenModel
from coterie.rounds.population import Population
from coterie.rounds.sides import Arrays, HostSide, OwnerSide, ServerSide, ToldServerSide
from coterie.rounds.training import Purpose, Training, step
from coterie.secure_sum.chains import Chains, chains_for
from coterie.secure_sum.contribution import UnboundedValueError
from coterie.secure_sum.denoised import Denoiser
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import MemberHalf
from coterie.secure_sum.registry import KEYED, Signer, keyring_of, member_half, server_half
from coterie.studies.local_graph import LocalGraph
from coterie.studies.local_key import LocalKey, SharedLocalKey
from coterie.studies.local_latents import LocalLatents
from coterie.studies.local_rounds import MemberHost, Outcome
from coterie.studies.local_training import LocalHost, LocallyTrained, train
from coterie.studies.run_data import Feed
from coterie.studies.run_plan import run_plan
from coterie.systems.private_sides import planned_host_side
from coterie.systems.registry import asks_owners, owner_side
from coterie.systems.server_step import planned_server_side
from coterie.systems.shared.host_data import HostData
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators

__all__ = ["HostMaker", "InProcess", "KeptPrivate", "train_in_process", "train_plan"]

_VALID_S = 7 * 24 * 3600

See = Callable[[wire.WatchRunResponse], None]
"""Callback that receives each event, as a watcher of the services does."""

OnEvaluation = Callable[[Training, Sequence[HostSide], Mapping[str, NDArray[np.float32]]], None]
"""Callback that receives the state of training, the hosts and the version measured, after an evaluation."""


HostMaker = Callable[[int, HostData, Callable[[HostData], HostSide]], HostSide]
"""Function that makes a host's side from its number, its data and the function that makes the honest one."""


@dataclass(frozen=True)
class InProcess:
    """The result of a run in this process.

    Parameters
    ----------
    known : dict
        The run's facts, as the COS reports them (``GetReport``).
    trained : LocallyTrained
    hosts : list of HostSide
        Hosts that have users, in their order, with the users' private state after the last round; after `restore`,
        with that of the chosen version.
    plan : RunPlan
    items : tuple of str
        Keys of the model's items, in order.
    kept : list of KeptPrivate
        Private arrays of the hosts' users, in the order of ``hosts``.
    """

    known: dict[str, Any]
    trained: LocallyTrained
    hosts: list[HostSide]
    plan: RunPlan
    items: tuple[str, ...]
    kept: list[KeptPrivate]

    def model(self) -> dict[str, NDArray[np.float32]]:
        """Return the model of the chosen version, as participants fetch it."""
        side = planned_server_side(self.plan, len(self.items), self.trained.state.groups)
        return side.model(self.trained.best)

    def restore(self) -> None:
        """Restore users' private arrays as they were at the chosen version, as hosts do at the end of a run."""
        for one in self.kept:
            one.restore()


class KeptPrivate:
    """Private arrays of a host's users, with a copy of those at the best version so far."""

    def __init__(self) -> None:
        self._arrays: Arrays = {}
        self._best: Arrays = {}

    def __call__(self, initial: Arrays) -> Arrays:
        """Take the initial arrays, which the host's side goes on changing (`KeepPrivate`)."""
        self._arrays = initial
        return initial

    def keep(self) -> None:
        """Keep a copy of the arrays as they are now."""
        self._best = {name: array.copy() for name, array in self._arrays.items()}

    def restore(self) -> None:
        """Write the kept copy back."""
        for name, array in self._best.items():
            self._arrays[name][...] = array


def train_in_process(
    settings: RunSettings,
    feed: Feed,
    *,
    run_id: str,
    seed: int,
    see: See,
    on_evaluation: OnEvaluation | None = None,
    make_host: HostMaker | None = None,
    keep: bool = False,
) -> InProcess:
    """Train a rounds-based system in this process.

    Parameters
    ----------
    settings : RunSettings
    feed : Feed
    run_id : str
    seed : int
    see : callable
        Receives each event.
    on_evaluation : callable, optional
        Receives the state of training, the hosts, in the order of `InProcess.hosts`, and the model after each
        evaluation; the hosts hold the facts about single users, which no event has.
    make_host : callable, optional
        Makes the side of each host instead of the honest one.
    keep : bool
        Whether users' private arrays of the chosen version are kept, for `InProcess.restore`.

    Raises
    ------
    RunError
        The run fails; the message gives the reason.
    """
    plan = run_plan(settings, run_id=run_id, seed=seed, attributes=feed.attribute_names)
    if not plan.rounds.beacon:
        # No party here has to be convinced that a third party drew the beacon of the groups.
        plan.rounds.beacon = secrets.token_bytes(BEACON_BYTES)
    return train_plan(
        plan,
        feed,
        hosts=settings.federation.hosts,
        see=see,
        on_evaluation=on_evaluation,
        encryption=settings.encryption,
        make_host=make_host,
        keep=keep,
    )


def train_plan(
    plan: RunPlan,
    feed: Feed,
    *,
    hosts: int,
    see: See,
    on_evaluation: OnEvaluation | None = None,
    encryption: EncryptionSettings | None = None,
    make_host: HostMaker | None = None,
    keep: bool = False,
) -> InProcess:
    """Train any registered rounds-based system in this process, by a run's plan.

    Parameters
    ----------
    plan : RunPlan
    feed : Feed
    hosts : int
        Hosts over which the feed's users are spread.
    see, on_evaluation, make_host, keep
        As for `train_in_process`.
    encryption : EncryptionSettings, optional
        Settings of an encrypted sum; the defaults when absent.

    Raises
    ------
    ConfigError
        There is no such system or sum, or the settings are not the system's own.
    RunError
        The run fails; the message gives the reason.
    """
    people = _People(chains_for(plan.rounds.channel_rounds))
    graph, latents = LocalGraph(plan.run_id), LocalLatents(plan.seed)
    local, sides = [], []
    kept: list[KeptPrivate] = []
    for number in range(hosts):
        data = feed.hosted(number)
        if not data.users:
            continue
        device = f"client/host-{number}"
        kept.append(KeptPrivate())
        honest = partial(_honest, plan, kept[-1])
        side = honest(data) if make_host is None else make_host(number, data, honest)
        keys = key_hash(data.users, plan.seed)
        local.append(
            LocalHost(
                device,
                people.enrolled(len(data.users), device),
                side,
                partial(people.half, side),
                partial(people.denoiser, side, device),
                latents.before(side, keys) or graph.before(side, data.items, keys),
            )
        )
        sides.append(side)
    half = server_half(plan.secure_sum, aggregation=aggregation_of(plan.rounds))
    holders: Mapping[str, MemberHost] = {}
    shared: SharedLocalKey | None = None
    if plan.secure_sum in KEYED:
        terms = encryption or EncryptionSettings()
        devices = [one.device for one in local]
        if plan.secure_sum == "shared-key":
            shared = SharedLocalKey(plan, terms, people.bundles, devices, len(feed.dataset.items))
        key = shared or LocalKey(plan.run_id, terms, people.bundles)
        key.give(keyring_of(half))
        people.obfuscators, holders = key.obfuscators, key.holders

    owners = _owners(plan, feed)

    def server(groups: int) -> ServerSide:
        return planned_server_side(plan, len(feed.dataset.items), groups)

    ordered = sorted(local, key=lambda host: host.device)
    population = Population(
        [one for host in ordered for one in host.participants],
        [host.device for host in ordered for _ in host.participants],
    )
    groups = len(Conductor(plan, population, server(0), half).groups())
    conductor = Conductor(plan, population, server(groups), half)
    record = _Record(conductor, len(feed.dataset.items), see)
    record.began()

    def told(state: Training, arrays: Arrays) -> Arrays:
        """Return the arrays with the owners' answers about the model that was trained, in a round of training."""
        if not owners or state.purpose is not Purpose.TRAIN:
            return arrays
        model = conductor.side.model(arrays)
        return cast(ToldServerSide, conductor.side).told(arrays, [owner.answer(model) for owner in owners])

    def evaluated(state: Training, arrays: Arrays) -> None:
        record.evaluated(state, arrays)
        if keep and state.best == len(state.evaluations) - 1:
            for one in kept:
                one.keep()
        if on_evaluation is not None:
            on_evaluation(state, sides, conductor.side.model(arrays))

    try:
        with graph:
            trained = train(plan, server, half, local, holders, shared, told, evaluated, record.round_ended)
    except UnboundedValueError as error:
        # Over services the users concerned sit out the round; here the step would fail in every further round.
        raise RunError(f"the local step failed: {error}", hint="smaller steps, perhaps") from error
    # Under a shared key the server has no model in clear, so the share of closed items is unknown.
    closed_share = None if shared is not None else OpenModel(conductor).closed_share(trained.arrays)
    items = tuple(feed.dataset.items)
    return InProcess(record.known(trained.state, closed_share), trained, sides, plan, items, kept)


def _honest(plan: RunPlan, keep: KeptPrivate, data: HostData) -> HostSide:
    """Return a host's side; without stored private arrays in this process, users begin with the initial ones."""
    return planned_host_side(plan, data, key_hash(data.users, plan.seed), keep)


def _owners(plan: RunPlan, feed: Feed) -> list[OwnerSide]:
    """Return the data owners that have item features; none for a system that asks no owners."""
    if not asks_owners(plan.system):
        return []
    owned = [feed.owned(owner) for owner in range(len(feed.partition.names))]
    return [
        owner_side(plan.system, plan.settings, items, features, plan.seed)
        for items, features in owned
        if features is not None
    ]


class _People:
    """Participants of a run in this process: their identities, and bundles signed by a local directory."""

    def __init__(self, chains: Chains | None) -> None:
        self._chains = chains
        self._directory = Ed25519PrivateKey.generate()
        self._public = self._directory.public_key().public_bytes_raw()
        self._now = int(time.time())
        self._verified = Verified()
        self._signers: dict[bytes, Signer] = {}
        self.bundles: dict[bytes, Bundle] = {}
        self.obfuscators: Obfuscators | None = None

    def enrolled(self, count: int, party: str) -> list[bytes]:
        """Create ``count`` participants of a party and return their ids."""
        found = []
        for _ in range(count):
            identity = Identity.generate()
            validity = (self._now - _VALID_S, self._now + _VALID_S)
            bundle = countersign(identity.bundle(1, validity), self._directory, party)
            self.bundles[bundle.participant_id] = bundle
            signer = Signer(identity, bundle, self._public, self._now, self._verified, chains=self._chains)
            self._signers[bundle.participant_id] = signer
            found.append(bundle.participant_id)
        return found

    def half(self, side: HostSide, plan: SumPlan, member: int) -> MemberHalf:
        """Return a member's half of the secure sum."""
        signer = self._signers[plan.members[member].participant]
        layout = side.layout(Purpose(plan.purpose))
        return member_half(
            plan,
            member,
            replace(signer, obfuscators=self.obfuscators, layout=layout, bundles=self.bundles),
        )

    def denoiser(self, side: HostSide, device: str, plan: SumPlan) -> Denoiser:
        """Return a host's half of a denoised sum as a denoiser."""
        place = plan.denoisers.place_of(device)
        if place is None:
            raise AssertionError("only denoisers are asked to denoise")
        identity = self._signers[plan.members[plan.denoisers.ring[place]].participant].identity
        return Denoiser(plan, device, identity, side.layout(Purpose(plan.purpose)), self.bundles)


class _Record:
    """Recorder of a run in this process: sends events to the watcher and keeps the report's facts."""

    def __init__(self, conductor: Conductor, items: int, see: See) -> None:
        self._conductor = conductor
        self._items = items
        self._see = see
        self._users = len(conductor.population)
        self._hosts = len(set(conductor.population.devices))
        state = new_training(conductor.plan, conductor.side)
        self._state = step(state, conductor.started(range(self._users)))
        self._mark = time.perf_counter()
        self._phase = wire.RunPhase.RUN_PHASE_GATHER
        self._phases: list[dict[str, Any]] = []
        self._history: list[dict[str, Any]] = []
        self._rounds: list[dict[str, Any]] = []

    def began(self) -> None:
        """Record the beginning of the run."""
        self._changed(self._state)

    def round_ended(self, state: Training, outcome: Outcome) -> None:
        """Record a round that has ended; ``state`` is the state of training after it."""
        now = time.perf_counter()
        before, self._state = self._state, state
        cohort = self._conductor.cohort(before)
        members = len(self._conductor.members(cohort))
        done = outcome.total is not None
        event = wire.RoundEvent(
            round=state.round,
            purpose=before.purpose.value,
            pass_number=before.pass_number,
            users=len(cohort),
            members=members,
            summed=outcome.users if done else 0,
            dropped=members - len(outcome.submitters) if done else 0,
            refused=len(outcome.refused),
            reason=outcome.reason,
            phases=["round"],
            seconds=[now - self._mark],
            version=state.version,
            liars=len(outcome.wrong),
            dropped_places=outcome.dropped_places,
            left_out=len(outcome.left_out),
            withdrawn=outcome.withdrawn,
        )
        self._mark = now
        self._rounds.append(
            {
                "round": event.round,
                "time_ms": _now_ms(),
                "purpose": event.purpose,
                "pass": event.pass_number,
                "users": event.users,
                "members": event.members,
                "summed": event.summed,
                "dropped": event.dropped,
                "refused": event.refused,
                "liars": event.liars,
                "reason": event.reason,
                "seconds": {"round": event.seconds[0]},
                "bytes_in": None,
                "version": event.version,
                "silent_owners": [],
                "dropped_places": event.dropped_places,
                "left_out": event.left_out,
                "withdrawn": list(event.withdrawn),
            }
        )
        self._show(wire.WatchRunResponse(round=event))
        if len(state.evaluations) == len(before.evaluations):
            self._changed(state)

    def evaluated(self, state: Training, arrays: Arrays) -> None:
        """Record the last evaluation of a state."""
        last = state.evaluations[-1]
        metrics, users = dict(last.metrics), dict(last.users)
        entry = {
            "epoch": last.pass_number,
            "version": last.version,
            "time_ms": _now_ms(),
            "metrics": metrics,
            "users": users,
        }
        self._history.append(entry)
        event = wire.MetricsEvent(
            epsilon=self._epsilon(state),
            epoch=last.pass_number,
            version=last.version,
            names=list(metrics),
            means=list(metrics.values()),
            users=[users[name] for name in metrics],
        )
        self._show(wire.WatchRunResponse(metrics=event))
        self._changed(state)
        self._mark = time.perf_counter()

    def _epsilon(self, state: Training) -> float:
        spent = privacy.known(self._conductor, state)
        return 0.0 if spent is None else float(spent["epsilon"])

    def known(self, state: Training, closed_share: float | None) -> dict[str, Any]:
        """Return the run's facts, as the COS reports them (``GetReport``)."""
        chosen = state.chosen
        return {
            "phase": state.phase.value,
            "reason": state.reason,
            "version": state.version,
            "users": self._users,
            "items": self._items,
            "parties": [],
            "waits": [],
            "resumes": [],
            "phases": self._phases,
            "history": self._history,
            "rounds": self._rounds,
            "abandoned": state.abandoned,
            "groups": state.groups,
            "closed_share": closed_share,
            "privacy": privacy.known(self._conductor, state),
            "chosen": None
            if chosen is None
            else {
                "version": chosen.version,
                "epoch": chosen.pass_number,
                "metrics": dict(chosen.metrics),
                "users": dict(chosen.users),
            },
        }

    def _changed(self, state: Training) -> None:
        """Record the phase of a state, if it has changed."""
        phase = _phase_of(state)
        if phase == self._phase:
            return
        self._phase = phase
        self._phases.append(
            {
                "time_ms": _now_ms(),
                "phase": wire.RunPhase.Name(phase).removeprefix("RUN_PHASE_").lower(),
                "epoch": state.pass_number,
                "owners": None,
                "hosts": self._hosts,
                "version": state.version,
            }
        )
        self._show(wire.WatchRunResponse(phase=wire.PhaseEvent(phase=phase, epoch=state.pass_number)))

    def _show(self, event: wire.WatchRunResponse) -> None:
        state = self._state
        event.state.CopyFrom(
            wire.RunState(
                plan=self._conductor.plan,
                phase=self._phase,
                epoch=state.pass_number,
                version=state.version,
                hosts_alive=self._hosts,
                users=self._users,
                items=self._items,
                reason=state.reason,
            )
        )
        event.time_ms = _now_ms()
        self._see(event)


def _phase_of(state: Training) -> wire.RunPhase.ValueType:
    if state.phase.ended:
        return wire.RunPhase.Value(f"RUN_PHASE_{state.phase.name}")
    supports = state.purpose is Purpose.SUPPORTS
    return wire.RunPhase.RUN_PHASE_SUPPORTS if supports else wire.RunPhase.RUN_PHASE_ROUNDS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
