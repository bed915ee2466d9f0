from __future__ import annotations

import json
import threading
import time

import pytest

from coterie.telemetry.accounting import SECURITY, Accounting


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_an_activity_is_charged_what_its_thread_computes_and_nothing_for_waiting() -> None:
    accounting = Accounting()
    with accounting.activity("compute"):
        burn(0.03)
    with accounting.activity("wait"):
        threading.Event().wait(0.03)
    activities = accounting.cpu_seconds()["activities"]
    assert activities["compute"] >= 0.03
    assert activities["wait"] < activities["compute"]


def test_what_other_threads_compute_meanwhile_is_theirs() -> None:
    accounting = Accounting()

    def other() -> None:
        with accounting.activity("theirs"):
            burn(0.03)

    thread = threading.Thread(target=other)
    with accounting.activity("ours"):
        thread.start()
        thread.join()
    activities = accounting.cpu_seconds()["activities"]
    assert activities["theirs"] >= 0.03 > activities["ours"]


def test_time_and_counts_of_one_activity_add_up() -> None:
    accounting = Accounting()
    for count in (3, 4):
        with accounting.activity("seal", count):
            burn(0.005)
    with accounting.activity("open"):
        pass
    assert accounting.counts() == {"open": 1, "seal": 7}
    assert accounting.cpu_seconds()["activities"]["seal"] >= 0.01


def test_an_activity_that_fails_is_counted_all_the_same() -> None:
    accounting = Accounting()

    def fails() -> None:
        with accounting.activity("open", 2):
            burn(0.005)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert accounting.counts() == {"open": 2}
    assert accounting.cpu_seconds()["activities"]["open"] >= 0.005


def test_security_is_the_sum_of_the_activities_that_exist_to_protect() -> None:
    accounting = Accounting()
    for name in (*SECURITY, "gradients", "blocks"):
        with accounting.activity(name):
            burn(0.004)
    account = accounting.cpu_seconds()
    assert account["security"] == pytest.approx(
        sum(account["activities"][name] for name in SECURITY), abs=1e-5
    )
    assert account["security"] < sum(account["activities"].values()) <= account["total"]


def test_the_start_is_what_was_spent_until_it_was_marked() -> None:
    accounting = Accounting()
    assert accounting.cpu_seconds()["start"] == 0
    accounting.started()
    burn(0.01)
    account = accounting.cpu_seconds()
    assert 0 < account["start"] <= account["total"] - 0.01


def test_the_account_can_be_written_to_a_file() -> None:
    accounting = Accounting()
    with accounting.activity("seal"):
        pass
    account = accounting.cpu_seconds()
    assert json.loads(json.dumps(account)) == account
    assert 1 < Accounting.peak_rss_mb() < 1 << 20
