"""Measure distributed noise: masked runs of FedMF with noise against the same runs without, in one process.

The first call of each run is not measured: tables of the noise are computed once for each variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.rows import Ask, Row, in_turn, lower
from coterie.config.run import RunSettings
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed

_USUAL = {
    "hosts": {"users": 1000, "items": 1600, "interactions": 100_000},
    "users": {"users": 100, "items": 1600, "interactions": 10_000},
}
_SMALL = {"users": 30, "items": 40, "interactions": 400}
_FEW = {"hosts": _SMALL, "users": _SMALL}
_PRIVATE = {"place": "distributed", "noise": 4.0, "clip": 1.0}


def rows(ask: Ask) -> Iterator[Row]:
    """Measure runs whose members are hosts, and runs whose members are single users."""
    for who, hosts, alone in (("hosts", 7, False), ("users", 1, True)):
        sizes = ask.size(_USUAL, _FEW)[who]
        data: dict[str, Any] = {"synthetic": sizes} if ask.data is None else {"path": ask.data}
        ours, theirs = in_turn(
            _run(data, hosts, _PRIVATE, alone=alone), _run(data, hosts, {}, alone=alone), ask.size(5, 1)
        )
        yield lower(
            f"noise.{who}",
            ours,
            theirs,
            "CPU s",
            f"a run of three passes with distributed noise, against one without; members are {who}; {data}",
        )


def _run(data: dict[str, Any], hosts: int, private: dict[str, Any], *, alone: bool) -> Callable[[], object]:
    settings = RunSettings.model_validate(
        {
            "system": "fedmf",
            "secure_sum": "masked",
            "data": data,
            "split": {"kind": "random"},
            "rounds": {
                "cohorts": "all",
                "passes": 3,
                "evaluate_every": 3,
                "party_per_user": alone,
                "privacy": private,
            },
            "federation": {"hosts": hosts},
        }
    )
    feed = make_feed(settings, load(settings), 0)
    return lambda: train_in_process(settings, feed, run_id="bench", seed=0, see=lambda event: None)
