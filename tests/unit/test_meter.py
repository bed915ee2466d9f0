from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.net.meter import Meter, RpcTotals, merge

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["Poll", "Exchange", "Submit"]),
        st.floats(0.01, 1e4),
        st.one_of(st.none(), st.floats(0, 0.01)),
        st.booleans(),
        st.integers(0, 1 << 40),
    ),
    max_size=40,
)


def metered(calls: list[tuple[str, float, float | None, bool, int]]) -> Meter:
    meter = Meter()
    for rpc, total_ms, server_ms, failed, size in calls:
        totals = meter[f"/coterie.v1.Orchestrator/{rpc}"]
        totals.bytes_out += size
        totals.bytes_in += 2 * size
        totals.finished(total_ms=total_ms, server_ms=server_ms, failed=failed)
    return meter


@given(CALLS)
def test_calls_errors_and_bytes_add_up(calls: list[tuple[str, float, float | None, bool, int]]) -> None:
    meter = metered(calls)
    summary = meter.summary()
    assert list(summary) == sorted({call[0] for call in calls})
    for rpc, traffic in summary.items():
        own = [call for call in calls if call[0] == rpc]
        assert traffic["calls"] == len(own)
        assert traffic["errors"] == sum(failed for _, _, _, failed, _ in own)
        assert traffic["bytes_out"] * 2 == traffic["bytes_in"] == 2 * sum(call[4] for call in own)
        assert traffic["p50_ms"] == pytest.approx(np.percentile([call[1] for call in own], 50), abs=1e-3)
        assert traffic["p99_ms"] == pytest.approx(np.percentile([call[1] for call in own], 99), abs=1e-3)
    assert meter.bytes_out == sum(traffic["bytes_out"] for traffic in summary.values())
    assert meter.bytes_in == sum(traffic["bytes_in"] for traffic in summary.values())


@given(CALLS)
def test_the_networks_time_is_what_the_server_did_not_take(
    calls: list[tuple[str, float, float | None, bool, int]],
) -> None:
    for rpc, traffic in metered(calls).summary().items():
        known = [(total, server) for name, total, server, _, _ in calls if name == rpc and server is not None]
        if not known:
            assert traffic["server_p50_ms"] is traffic["network_p50_ms"] is None
            continue
        assert traffic["server_p50_ms"] == pytest.approx(np.median([s for _, s in known]), abs=1e-3)
        assert traffic["network_p50_ms"] == pytest.approx(np.median([t - s for t, s in known]), abs=1e-3)


@given(CALLS, CALLS)
def test_accounts_of_several_processes_merge_to_the_account_of_one(
    first: list[tuple[str, float, float | None, bool, int]],
    second: list[tuple[str, float, float | None, bool, int]],
) -> None:
    # As they come out of the file that each process leaves.
    accounts = [json.loads(json.dumps(metered(calls).account())) for calls in (first, second)]
    assert merge(accounts) == metered(first + second).summary()


def test_an_rpc_that_was_never_called_is_not_in_a_merged_account() -> None:
    meter = Meter()
    assert meter["/coterie.v1.Orchestrator/Poll"].calls == 0
    assert merge([meter.account()]) == {}
    assert merge([]) == {}


def test_without_calls_no_time_is_made_up() -> None:
    traffic = RpcTotals().summary()
    assert (traffic["calls"], traffic["p50_ms"], traffic["network_p50_ms"]) == (0, None, None)


@settings(deadline=None, max_examples=20)
@given(st.integers(4090, 4110), st.integers(0, 9000))
def test_percentiles_are_of_the_most_recent_calls_and_counts_of_all(before: int, after: int) -> None:
    totals = RpcTotals()
    for n in range(before + after):
        totals.finished(total_ms=float(n), server_ms=None, failed=False)
    assert totals.summary()["calls"] == before + after
    assert len(totals.total_ms) == len(totals.server_ms) == min(before + after, 4096)
    assert sorted(totals.total_ms) == [float(n) for n in range(before + after)][-4096:]
    assert all(math.isnan(value) for value in totals.server_ms)


def test_full_names_and_short_names_are_the_same_rpc() -> None:
    meter = Meter()
    meter["/coterie.v1.Orchestrator/Poll"].bytes_in += 3
    meter["Poll"].bytes_in += 4
    assert meter.bytes_in == meter["Poll"].bytes_in == 7


def test_the_networks_time_is_what_the_server_did_not_spend_on_calls_that_succeeded() -> None:
    totals = RpcTotals()
    totals.finished(total_ms=50.0, server_ms=10.0, failed=False)
    totals.finished(total_ms=30.0, server_ms=25.0, failed=False)
    totals.finished(total_ms=900.0, server_ms=None, failed=False)
    totals.finished(total_ms=900.0, server_ms=1.0, failed=True)
    assert totals.network_ms == 45.0
    assert totals.summary()["network_s"] == 0.045
