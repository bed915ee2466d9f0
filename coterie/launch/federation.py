"""A whole federation on this machine: every service a process of its own, on loopback, with mutual TLS.

>>> # async with Federation(settings, feed, folder, run_id="example") as federation:
>>> #     await federation.start()
>>> #     async for event in federation.watch():
>>> #         ...
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from coterie.config.base import EnrolSettings, Peer, ServiceSettings
from coterie.config.run import RunSettings
from coterie.crypto.authority import logical_name
from coterie.errors import RunError
from coterie.launch.authority import make_authority, make_token
from coterie.launch.children import Child, free_port
from coterie.launch.feed import Feed
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.operator_pb2_grpc import OperatorStub
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["Federation"]

_HOST = "127.0.0.1"
_START_S = 60.0


class Federation:
    """Third party, COS, data owners and client hosts for one run.

    Parameters
    ----------
    settings : RunSettings
        The run.
    feed : Feed
        The data, divided.
    folder : Path
        Where everything of this federation goes; one folder per process.
    run_id : str
        Id of the run, a DNS label.
    seed : int
        Seed of the learning.
    """

    def __init__(self, settings: RunSettings, feed: Feed, folder: Path, *, run_id: str, seed: int) -> None:
        self._settings = settings
        self._feed = feed
        self._folder = folder
        self._run_id = run_id
        self._seed = seed
        self.children: dict[str, Child] = {}
        self._late: list[Child] = []
        self._channel: Channel | None = None
        self._operator: Any = None
        self._meter = Meter()
        self.started_at = 0.0
        self.start_seconds = 0.0

    async def __aenter__(self) -> Self:
        """Make the folder; processes start with ``start``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every process, whatever happened."""
        await self.stop()

    @property
    def cos(self) -> Child:
        """The orchestration server's process."""
        return self.children["cos/cos"]

    def plan(self) -> RunPlan:
        """Return the plan that every participant gets."""
        drift = self._settings.drift
        return RunPlan(
            run_id=self._run_id,
            system=self._settings.system,
            form=drift.form,
            secure_sum=self._settings.secure_sum,
            dim=drift.dim,
            rate=drift.rate,
            ridge=drift.ridge,
            theta=drift.theta,
            item_bias=drift.item_bias,
            seed=self._seed,
            max_staleness=drift.max_staleness,
            epochs=drift.epochs,
            min_users=self._settings.federation.min_users,
        )

    # --- starting ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every process, enrol the operator and create the run.

        Raises
        ------
        RunError
            When a process ends or the COS does not answer in time.
        """
        begun = time.perf_counter()
        self._configure()
        for child in self.children.values():
            if child not in self._late:
                child.start()
        operator = self._folder / "operator"
        token = operator / "token"
        await enrol(
            "operator",
            ServiceSettings(
                name="operator",
                state=operator,
                listen=f"{_HOST}:0",
                enrol=EnrolSettings(
                    address=self._addresses["enrol"],
                    ca_file=self._folder / "thirdparty" / "state" / "ca.pem",
                    token_file=token,
                    timeout_s=_START_S,
                ),
            ),
            TlsFiles(operator / "tls"),
            [],
        )
        self._channel = connect(
            self._addresses["cos"],
            TlsFiles(operator / "tls").channel_credentials(),
            tls_name=logical_name("cos", "cos"),
            peer="cos/cos",
            meter=self._meter,
        )
        self._operator = self._channel.stub(OperatorStub)
        federation = self._settings.federation
        late_owners = sum(self._owners_of(child) for child in self._late)
        request = wire.StartRunRequest(
            plan=self.plan(),
            expect_owners=len(self._feed.partition.names) - late_owners,
            expect_users=self._users,
            phase_timeout_ms=int(federation.phase_timeout_s * 1000),
            party_timeout_ms=int(federation.party_timeout_s * 1000),
            evaluate_every=federation.evaluate_every,
        )
        await self._ask(lambda: self._operator.StartRun(request))
        self.started_at = time.time()
        self.start_seconds = time.perf_counter() - begun

    def _configure(self) -> None:
        ports = {name: f"{_HOST}:{free_port()}" for name in ("thirdparty", "enrol", "cos")}
        self._addresses = ports
        authority = Child("thirdparty", "directory", self._folder / "thirdparty")
        make_authority(authority.state)
        transcript = self._settings.federation.transcripts or self._settings.federation.attacks
        authority.configure(
            {
                "listen": ports["thirdparty"],
                "enrol_listen": ports["enrol"],
                "tokens": authority.state / "tokens.jsonl",
                "transcript": transcript,
            }
        )
        self.children[authority.party] = authority
        make_token(authority.state, "operator", "operator", 0, self._folder / "operator" / "token")

        def add(child: Child, participants: int, values: dict[str, Any]) -> Child:
            token = child.folder / "token"
            make_token(authority.state, child.role, child.name, participants, token)
            child.configure(
                {
                    **values,
                    "transcript": transcript,
                    "thirdparty": {"address": ports["thirdparty"], "name": "directory"},
                    "enrol": {
                        "address": ports["enrol"],
                        "name": "directory",
                        "ca_file": authority.state / "ca.pem",
                        "token_file": token,
                        "timeout_s": _START_S,
                    },
                }
            )
            self.children[child.party] = child
            return child

        add(Child("cos", "cos", self._folder / "cos"), 0, {"listen": ports["cos"]})
        self._add_owners(add)
        self._users = 0
        for host in range(self._settings.federation.hosts):
            child = Child("client", f"host-{host}", self._folder / f"host-{host}")
            histories = child.folder / "histories.csv"
            users = self._feed.write_histories(host, histories)
            if not users:
                continue
            self._users += users
            add(
                child,
                users,
                {
                    "listen": f"{_HOST}:{free_port()}",
                    "run": self._run_id,
                    "histories": histories,
                    "seed": self._seed,
                    "cos": {"address": ports["cos"], "name": "cos"},
                },
            )

    def _add_owners(self, add: Any) -> None:
        names = self._feed.partition.names
        options = self._settings.federation
        count = options.owner_processes or len(names)
        groups = [list(group) for group in np.array_split(np.arange(len(names)), min(count, len(names)))]
        churn, epochs = options.churn, self._settings.drift.epochs
        for position, group in enumerate(groups):
            first = names[group[0]]
            name = first if len(group) == 1 else f"owners-{position}"
            child = Child("data-owner", name, self._folder / f"owner-{name}")
            owners = []
            for owner in group:
                items = child.folder / f"items-{names[owner]}.csv"
                self._feed.write_items(int(owner), items)
                owners.append({"name": names[owner], "items": items})
            values: dict[str, Any] = {
                "listen": f"{_HOST}:{free_port()}",
                "run": self._run_id,
                "cos": {"address": self._addresses["cos"], "name": "cos"},
                "owners": owners,
            }
            if position >= len(groups) - churn.owners:
                values["leave_after_epoch"] = max(1, math.floor(epochs * churn.leave_at))
                self._late.append(child)
            add(child, len(owners), values)

    @staticmethod
    def _owners_of(child: Child) -> int:
        return (child.folder / "config.toml").read_text().count("[[owners]]")

    # --- running -----------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncIterator[wire.WatchRunResponse]:
        """Yield the run's events until it has ended; late owners are started on the way.

        Raises
        ------
        RunError
            When a process ends by itself, or the COS cannot be reached for too long.
        """
        join_after = math.floor(self._settings.drift.epochs * self._settings.federation.churn.join_at)
        following, patience = 1, time.monotonic()
        while True:
            request = wire.WatchRunRequest(run_id=self._run_id, from_event=following)
            try:
                async for event in self._operator.WatchRun(request, timeout=24 * 3600.0):
                    patience = time.monotonic()
                    following = event.number + 1 if event.number else following
                    for child in self._late:
                        if child.process is None and event.state.epoch > join_after:
                            child.start()
                    self._require_alive()
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                # The COS may be restarting; events are numbered, so nothing is missed.
                self._require_alive()
                if time.monotonic() - patience > _START_S:
                    raise RunError(f"the COS cannot be reached: {error.details()}") from error
                await asyncio.sleep(0.2)

    watched: bool = True
    """Whether a child that ends by itself fails the run; tests that kill children turn it off."""

    def _require_alive(self) -> None:
        if self.watched:
            for child in self.children.values():
                # An owner that leaves the run ends as asked.
                if not (child in self._late and child.process is not None and child.process.poll() == 0):
                    child.require_alive()

    async def report(self) -> dict[str, Any]:
        """Return what the COS knows about the run."""
        request = wire.GetReportRequest(run_id=self._run_id)
        response = await self._ask(lambda: self._operator.GetReport(request))
        report: dict[str, Any] = json.loads(response.json)
        return report

    async def run_state(self) -> wire.RunState:
        """Return the state of the run."""
        response = await self._ask(lambda: self._operator.GetRun(wire.GetRunRequest(run_id=self._run_id)))
        state: wire.RunState = response.run
        return state

    async def _ask(self, attempt: Any) -> Any:
        async def checked() -> Any:
            self._require_alive()
            return await attempt()

        try:
            return await Retry(limit_s=_START_S)(checked)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "cos/cos") from error

    # --- stopping ----------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop every process: clients and owners first, the third party last."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        order = ("client", "data-owner", "cos", "thirdparty")
        for role in order:
            await asyncio.gather(*(child.stop() for child in self.children.values() if child.role == role))

    def accounts(self) -> dict[str, dict[str, Any]]:
        """Return the accounts that the processes left, by party."""
        found = {party: child.account() for party, child in self.children.items()}
        return {party: account for party, account in found.items() if account is not None}
