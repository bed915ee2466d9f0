"""deploy/wan.py: when packets arrive on an emulated path, and what is no network."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "deploy" / "wan.py"

_spec = importlib.util.spec_from_file_location("wan", FILE)
wan = importlib.util.module_from_spec(_spec)
sys.modules["wan"] = wan
_spec.loader.exec_module(wan)


def path(**how):
    return wan.Path(wan.Conditions(**how), random.Random(7))


def test_a_packet_waits_for_the_delay():
    assert path(delay_s=0.02).due(100.0, 1500) == pytest.approx(100.02)


def test_packets_that_arrive_together_leave_one_after_the_other_at_the_rate():
    link = path(delay_s=0.01, rate=12e6)
    assert [link.due(5.0, 1500) for _ in range(3)] == pytest.approx([5.011, 5.012, 5.013])
    # Unused time is not saved up.
    assert link.due(6.0, 1500) == pytest.approx(6.011)


def test_what_would_wait_longer_than_the_buffer_holds_is_lost():
    link = path(rate=12e6, buffer_s=0.0035)
    assert [link.due(0.0, 1500) is None for _ in range(6)] == [False] * 4 + [True] * 2
    assert link.due(0.004, 1500) == pytest.approx(0.005)


def test_the_share_that_is_asked_for_is_lost():
    link = path(loss=0.1)
    lost = sum(link.due(float(n), 100) is None for n in range(20_000))
    assert lost / 20_000 == pytest.approx(0.1, rel=0.1)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 65_000)), max_size=50),
    st.floats(0, 0.1),
    st.floats(0, 1),
    st.sampled_from([0.0, 1e6, 1e9]),
)
def test_no_packet_overtakes_another_or_is_early(arrivals, delay, share, rate):
    jitter = delay * share
    link, now, last = path(delay_s=delay, jitter_s=jitter, rate=rate), 0.0, 0.0
    for gap, length in arrivals:
        now += gap
        due = link.due(now, length)
        if due is not None:
            assert due >= last
            assert due >= now + delay - jitter - 1e-9
            last = due


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--delay", "-1"], "delay is out of its range, 0 to 10000 ms"),
        (["--delay", "nan"], "delay is out of its range"),
        (["--delay", "5", "--jitter", "6"], "jitter is out of its range"),
        (["--loss", "100"], "loss is out of its range, 0 to below 100 percent"),
        (["--rate", "1e-9"], "rate is out of its range"),
        (["--rate", "1", "--buffer", "0"], "buffer is out of its range"),
        (["--delay", "1", "--queue", "70000"], "queue 70000 is out of its range"),
        (["--delay", "1", "--namespace", "nowhere-at-all"], "no network namespace nowhere-at-all"),
        (
            ["--delay", "1", "--between", "10.0.0.1", "cos"],
            "'cos' does not appear to be an IPv4 or IPv6 address",
        ),
        (["--delay", "1", "--between", "10.0.0.1", "::1"], "expected two addresses of one kind"),
    ],
)
def test_what_is_no_network_is_refused_with_what_is_expected(capsys, arguments, says):
    assert wan.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_options_are_those_of_the_first_variable_that_is_not_empty(capsys, monkeypatch):
    monkeypatch.setenv("WAN_ONE", " ")
    monkeypatch.setenv("WAN_ALL", "--loss 100")
    names = [
        "--from-environment",
        "WAN_NONE",
        "--from-environment",
        "WAN_ONE",
        "--from-environment",
        "WAN_ALL",
    ]
    assert wan.main(names) == 2
    assert "loss is out of its range" in capsys.readouterr().err
    monkeypatch.setenv("WAN_ONE", "--delay -1")
    assert wan.main(names) == 2
    assert "delay is out of its range" in capsys.readouterr().err
