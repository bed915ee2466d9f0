"""A real client host of a few users in the rounds of a real orchestration server, and what a test asks of both."""

import asyncio
import contextlib
import csv
import json
import sqlite3
import time

import numpy as np

from coterie.parties.party import Registrant
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.v1 import client_pb2 as agent_wire
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

SOON_S = 60.0
ITEMS = [f"item-{n:02}" for n in range(12)]
NAMES = [f"user-{n}" for n in range(5)]
SETTINGS = FedNcfSettings(model="neumf", dim=4, min_touch=1)
SEED = 11
"""Seed for which users' validation items rank higher after training."""

TRUSTING = {"min_cohort": 1, "min_sum": 1}
HISTORY = {
    name: [ITEMS[n] for n in np.random.default_rng(at).permutation(len(ITEMS))[:6]]
    for at, name in enumerate(NAMES)
}
"""Items of each user in the order of time; the last is for the test, the one before for validation."""


def write_histories(path, history=HISTORY):
    path.touch(mode=0o600)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "positive", "time", "part"])
        for name, items in history.items():
            parts = [0] * (len(items) - 2) + [1, 2]
            for at, (item, part) in enumerate(zip(items, parts, strict=True)):
                writer.writerow([name, item, 1, 1000 + at, part])
    return path


def query(service, text):
    with contextlib.closing(sqlite3.connect(service.state / "client.db")) as connection:
        return connection.execute(text).fetchall()


def change(service, text):
    """Change the store of a host that is stopped."""
    with contextlib.closing(sqlite3.connect(service.state / "client.db")) as connection:
        connection.execute(text)
        connection.commit()


class World:
    """A run with one data owner, played by the test, and one real host, by default of five users."""

    def __init__(
        self, calls, third_party, start_member, certificates, tmp_path, cos, history=HISTORY, items=ITEMS
    ):
        self.calls, self.third_party, self.start_member = calls, third_party, start_member
        self.certificates, self.cos = certificates, cos
        self.run = f"hosted-{time.monotonic_ns()}"
        self.users, self.items = len(history), items
        self.histories = write_histories(tmp_path / "histories.csv", history)
        self.operator = calls.Operating(cos, certificates["operator"])

    async def begin(self, *, secure_sum="clear", per_user=False, users=None, settings=SETTINGS, **rounds):
        self.settings = settings
        usual = {
            "cohorts": wire.CohortKind.COHORT_KIND_ALL,
            "cohort": 1,
            "group": 1000,
            "beacon": bytes(32),
            "party_per_user": per_user,
            "min_cohort": 1,
            "min_sum": 1,
            "experiment": True,
            "passes": 1,
            "evaluate_every": 1,
            "choose_by": "validation_ndcg_all@10",
            "step_timeout_ms": 3_600_000,
        }
        await self.operator.start(
            self.run,
            owners=1,
            users=users or self.users,
            system="fedncf",
            form="users" if per_user else "hosts",
            secure_sum=secure_sum,
            settings=settings.to_json(),
            rounds=wire.RoundsPlan(**{**usual, **rounds}),
        )
        owner = await self.third_party.enrol("data-owner", f"owner-{self.run}", 1)
        member = Registrant(
            owner.identities[0],
            owner.bundles[0],
            wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER,
            name="zoo",
            address="127.0.0.1:1",
            tls_name="zoo.data-owner.coterie.internal",
            items=self.items,
        )
        await self.calls.party_at(self.cos, owner, self.run).register([member])

    def host(self, *, healthy=True, **keys):
        """Start the host."""
        usual = {
            "participants": self.users,
            "histories": self.histories,
            "cos": {"address": self.cos.address, "name": self.cos.name},
            "run": self.run,
            "consent": TRUSTING,
        }
        return self.start_member(
            "client", f"host-{self.run}", self.third_party, healthy=healthy, **{**usual, **keys}
        )

    async def over(self):
        """Wait until the run has ended, durably, and return its report."""
        async with asyncio.timeout(SOON_S):
            async for _ in self.operator.stub.WatchRun(
                operating.WatchRunRequest(run_id=self.run), timeout=SOON_S
            ):
                pass
        answer = await self.operator.stub.GetReport(operating.GetReportRequest(run_id=self.run))
        return json.loads(answer.json)

    async def receipt(self, host, user):
        agent = host.channel(self.certificates["operator"]).stub(UserAgentStub)
        answer = await agent.DisclosureReceipt(agent_wire.DisclosureReceiptRequest(user=user))
        return {one.kind: one for one in answer.disclosures}, list(answer.declined)
