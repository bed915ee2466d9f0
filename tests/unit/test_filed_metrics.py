"""Metric sums of hosts in DRIFT's published form: filed once, and told from others also without a hash beside them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from coterie_cos.drift.asynchronous import AsynchronousRun

from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.drift import published_run as rounds
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef

HOSTS = ("client/a", "client/b")


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[AsynchronousRun]:
    engine = open_sqlite(tmp_path / "cos.db", "cos")
    writer = Writer(engine)
    plan = wire.RunPlan(run_id="run", system="drift", form="published", dim=2, rate=0.1, theta=4, epochs=3)
    request = operator.StartRunRequest(plan=plan, expect_owners=1, expect_users=4)
    one = AsynchronousRun(request, tmp_path, Term(writer), 100, lambda: (0, 0))
    with engine.begin() as connection:
        row = {"run_id": "run", "request": b"", "plan_hash": b"", "state": one.state_json()}
        connection.execute(store.runs.insert(), row)
    for event in (rounds.OwnerJoined(0, "data-owner/zoo"), *(rounds.UsersJoined(host, 2) for host in HOSTS)):
        await one.take(event)
    await one.take(rounds.PointOpened(1, 0))
    assert one.point_open(1)
    yield one
    await one.drop()
    writer.close()


def metrics(total: float) -> bytes:
    sums = to_wire(np.array([[total, 2.0]]))
    return wire.MetricSums(names=["hit"], sums=sums).SerializeToString(deterministic=True)


async def submit(run: AsynchronousRun, payload: bytes, *, hashed: bool) -> None:
    sha256 = hashlib.sha256(payload).digest() if hashed else b""
    kind, at = wire.SubmitKind.SUBMIT_KIND_METRICS, RoundRef(run_id="run", round=1, point=1)
    await run.submitted(HOSTS[0], wire.SubmitRequest(kind=kind, round=at, sha256=sha256), [], payload)


@pytest.mark.parametrize("first", [True, False], ids=["hash first", "no hash first"])
@pytest.mark.parametrize("then", [True, False], ids=["hash then", "no hash then"])
async def test_the_same_sums_may_be_submitted_again_with_a_hash_or_without(
    run: AsynchronousRun, first: bool, then: bool
) -> None:
    await submit(run, metrics(1.0), hashed=first)
    await submit(run, metrics(1.0), hashed=then)


@pytest.mark.parametrize("then", [True, False], ids=["hash then", "no hash then"])
async def test_other_sums_than_those_on_file_are_refused(run: AsynchronousRun, then: bool) -> None:
    await submit(run, metrics(1.0), hashed=False)
    with pytest.raises(Refusal) as refused:
        await submit(run, metrics(2.0), hashed=then)
    assert refused.value.reason == ErrorReason.ERROR_REASON_CONFLICT
