"""Compare the Python interface with the command: the same run by both, and recommendations to one user and to all.

Each way is a process of its own, from its start to its end, as a person waits for it.  CPU is that of the process with
all its children, wall time that of the clock; the two ways are measured in turn.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows import Ask, Row, lower
from coterie.launch.children import toml

_TIMES = 3
_PASSES = 5
_BY_PYTHON = """
import json, sys, time
begun = time.perf_counter()
import coterie as ct
source, keys, in_process, asked = json.loads(sys.argv[1])
data = ct.load(source)
run = ct.FedNCF(**keys).fit(data.split("leave-random-out"), in_process=in_process)
run.metrics
found = {"fit": time.perf_counter() - begun, "folder": str(run.folder)}
if asked:
    users = data.dataset.users
    for name, some in (("one", users[:1]), ("all", users)):
        begun = time.perf_counter()
        run.recommend(some)
        found[name] = time.perf_counter() - begun
    found |= {"user": users[0], "users": len(users), "items": len(data.dataset.items)}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class _Spent:
    """What a process took, seconds by the clock and of CPU, and the last line that it printed."""

    wall: float
    cpu: float
    said: str


def _spent(arguments: Sequence[str], folder: Path) -> _Spent:
    """Run Python with arguments to the end.

    Raises
    ------
    RuntimeError
        It failed; the message has the end of what it said.
    """
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{arguments[:4]} ended with status {done.returncode}: {done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Spent(wall, cpu, (done.stdout.strip().splitlines() or [""])[-1])


def _source(ask: Ask, name: str) -> str | None:
    """Return the path of a data set of MovieLens, where ``COTERIE_DATA`` has it; None for the synthetic one."""
    root = os.environ.get("COTERIE_DATA")
    if ask.data is not None:
        return str(ask.data.absolute())
    found = None if root is None else Path(root).absolute() / name
    return str(found) if found is not None and found.is_dir() and not ask.smallest else None


def _keys(passes: int) -> dict[str, Any]:
    """Return the keys of the run, the same for both ways."""
    rounds = {"passes": passes, "patience": 0, "cohort": 100, "group": 100}
    return {"model": "gmf", "reference": False, "rounds": rounds}


def _by_python(
    source: str | None, passes: int, folder: Path, *, in_process: bool, asked: bool = False
) -> tuple[_Spent, dict[str, Any]]:
    given = json.dumps([source, _keys(passes), in_process, asked])
    spent = _spent(["-c", _BY_PYTHON, given], folder)
    return spent, json.loads(spent.said)


def _by_command(source: str | None, passes: int, folder: Path, *, in_process: bool) -> _Spent:
    keys = _keys(passes)
    tree = {
        "name": "bench",
        "system": "fedncf",
        "seeds": [0],
        "reference": keys["reference"],
        "fedncf": {"model": keys["model"]},
        "rounds": keys["rounds"],
        "split": {"kind": "leave-random-out"},
        **({} if source is None else {"data": {"path": source}}),
    }
    (folder / "run.toml").write_text(toml(tree))
    more = ["--in-process"] if in_process else []
    return _spent(["-m", "coterie", "run", "run.toml", *more], folder)


def _recommended(folder: Path, run: str, *whom: str) -> float:
    """Return the seconds that the command takes to recommend to somebody of a run."""
    return _spent(["-m", "coterie", "recommend", "--run", run, *whom], folder).wall


def rows(ask: Ask) -> Iterator[Row]:
    """Yield a row for each quantity."""
    times, passes = ask.size(_TIMES, 1), ask.size(_PASSES, 1)
    hundred = _source(ask, "ml-100k")
    about = f"FedNCF (GMF), {passes} passes, {'MovieLens 100K' if hundred else 'synthetic data'}"
    fits = {}
    for name, in_process in (("in_process", True), ("services", False)):
        ours, theirs, fit = [], [], []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                spent, said = _by_python(hundred, passes, folder, in_process=in_process)
                ours.append(spent)
                fit.append(said["fit"])
                theirs.append(_by_command(hundred, passes, folder, in_process=in_process))
        for clock in ("cpu", "wall"):
            one, other = (statistics.median(getattr(each, clock) for each in way) for way in (ours, theirs))
            note = f"{about}; Python against `coterie run`, median of {times}"
            yield lower(f"api.{name}.{clock}", one, other, "s", note)
        fits[name] = statistics.median(fit)
    note = f"{about}: import to `run.metrics`, in process against over services"
    yield lower("api.fit", fits["in_process"], fits["services"], "s", note)

    million = _source(ask, "ml-1m")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _, said = _by_python(million, 1, folder, in_process=False, asked=True)
        note = f"{said['users']} users, {said['items']} items; `run.recommend` against `coterie recommend`"
        one = _recommended(folder, said["folder"], "--user", said["user"])
        yield lower("api.recommend.one", said["one"], one, "s", note)
        several = _recommended(folder, said["folder"], "--all-users", "--out", "all.csv")
        yield lower("api.recommend.all", said["all"], several, "s", note)
