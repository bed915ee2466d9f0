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

_USUAL = {"users": 400, "items": 1600, "interactions": 40_000}
_FEW = {"users": 30, "items": 40, "interactions": 400}
_PRIVATE = {"place": "distributed", "noise": 4.0, "clip": 1.0}


def rows(ask: Ask) -> Iterator[Row]:
    """Measure runs whose members are hosts, and runs whose members are single users."""
    for who, hosts, alone in (("hosts", 7, False), ("users", 1, True)):
        ours, theirs = in_turn(
            _run(ask, hosts, _PRIVATE, alone=alone), _run(ask, hosts, {}, alone=alone), ask.size(3, 1)
        )
        sizes = ask.size(_USUAL, _FEW) if ask.data is None else ask.data
        yield lower(
            f"noise.{who}",
            ours,
            theirs,
            "CPU s",
            f"a run of three passes with distributed noise, against one without; members are {who}; {sizes}",
        )


def _run(ask: Ask, hosts: int, private: dict[str, Any], *, alone: bool) -> Callable[[], object]:
    data: dict[str, Any] = {"synthetic": ask.size(_USUAL, _FEW)} if ask.data is None else {"path": ask.data}
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
