"""Compare DRIFT epochs through all processes with the same mathematics in one process; measure growth with size."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.rows import Ask, Row, lower
from coterie.config.run import RunSettings
from coterie.data import Dataset, SyntheticSpec, generate
from coterie.evaluation.holdout import TRAIN
from coterie.launch.federation import Federation
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.drift.blocks import BlockBuilder, Stream
from coterie.systems.drift.mathematics import apply, fetch, gradients, initial, wanted
from coterie.systems.drift.sequential import run_in_process
from coterie.systems.drift.settings import DriftSettings
from coterie.wire.v1 import operator_pb2 as wire

_TICK = os.sysconf("SC_CLK_TCK")
THETAS = (2, 8, 32, 128)
THETA_LOCAL, LOCAL_UPDATES = 32, 8
"""The `theta` that is measured with several updates between two exchanges as well, and how many."""
_ALL = 1_000_000
"""A floor above the users of any host, so that hosts evaluate nothing, as in the run in one process."""


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a run, over all service processes."""

    start: float
    epoch_1: float
    epoch_2: float
    security: float
    agreement: float
    exchanges: int


def _process_seconds(federation: Federation) -> float:
    total = 0
    for child in federation.children.values():
        if child.process is not None:
            fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(") ")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICK


def settings_for(data: Path | None, theta: int, local_updates: int = 1, **federation: int) -> RunSettings:
    """Return the settings of a measured run: two epochs, few processes, no reference run, no evaluation."""
    return RunSettings.model_validate(
        {
            "data": {"path": data},
            "reference": False,
            "drift": {"theta": theta, "epochs": 2, "local_updates": local_updates},
            "federation": {"owners": 0, "owner_processes": 2, "hosts": 1, "min_users": _ALL, **federation},
        }
    )


async def spent(settings: RunSettings, feed: Feed) -> Spent:
    """Run a federation and read the processes' CPU clocks whenever a phase begins."""
    marks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with Federation(settings, feed, Path(folder), run_id="bench", seed=0) as federation:
            await federation.start()
            async for event in federation.watch():
                if event.HasField("phase"):
                    name = wire.RunPhase.Name(event.phase.phase).removeprefix("RUN_PHASE_")
                    marks.setdefault(f"{name}-{event.phase.epoch}", _process_seconds(federation))
            report = await federation.report()
        accounts = federation.accounts()

    def activity(*names: str) -> float:
        return sum(
            float(account["cpu_seconds"]["activities"].get(name, 0.0))
            for account in accounts.values()
            for name in names
        )

    return Spent(
        start=marks["INTAKE-1"],
        epoch_1=marks["EPOCH-2"] - marks["INTAKE-1"],
        epoch_2=marks["EVALUATE-2"] - marks["EPOCH-2"],
        security=activity("seal", "open"),
        agreement=activity("key agreement"),
        exchanges=report["version"],
    )


def streams(feed: Feed) -> list[Stream]:
    """Return each owner's interactions, user by user in the order of time."""
    data, train = feed.dataset, feed.split.part == TRAIN
    found = []
    for owner in range(len(feed.partition.names)):
        index = np.nonzero(train & feed.partition.member[data.item, owner])[0]
        at = data.time[index] if data.time is not None else index
        index = index[np.lexsort((index, at, data.user[index]))]
        found.append(Stream(data.user[index], data.item[index], feed.positive[index]))
    return found


def in_process(settings: RunSettings, feed: Feed) -> list[float]:
    """Return the CPU seconds of each epoch of the same training in this process."""
    data, marks = feed.dataset, [time.process_time()]
    run_in_process(
        streams(feed),
        len(data.users),
        len(data.items),
        settings.table(DriftSettings),
        epochs=settings.table(DriftSettings).epochs,
        seed=0,
        on_epoch=lambda *_: marks.append(time.process_time()),
    )
    return [after - before for before, after in itertools.pairwise(marks)]


def block_by_block(settings: RunSettings, feed: Feed) -> float:
    """Return the CPU seconds of one pass in this process with each block's gradient computed separately."""
    data, learning = feed.dataset, settings.table(DriftSettings)
    stored = []
    for stream in streams(feed):
        builder = BlockBuilder()
        interactions = zip(stream.user.tolist(), stream.item.tolist(), stream.positive.tolist(), strict=True)
        blocks = [block for one in interactions if (block := builder.add(*one)) is not None]
        stored.append(blocks + builder.flush())
    Upsilon, Psi = initial(len(data.users), len(data.items), learning, 0)
    begun = time.process_time()
    for blocks in stored:
        for at in range(0, len(blocks), learning.theta):
            updates = [
                gradients([block], fetch(Upsilon, Psi, *wanted([block])), learning.ridge)
                for block in blocks[at : at + learning.theta]
            ]
            for update in updates:
                apply(Upsilon, Psi, update, learning.rate)
    return time.process_time() - begun


def _dataset(ask: Ask) -> Dataset:
    if ask.data is not None:
        return load(settings_for(ask.data, 2))
    if ask.smallest:
        return generate(SyntheticSpec(users=12, items=40, interactions=240, genres=6, seed=0))
    return generate(SyntheticSpec(users=900, items=1600, interactions=100_000, genres=18, seed=0))


def epoch_rows(ask: Ask) -> Iterator[Row]:
    """Measure one epoch for each Theta."""
    dataset = _dataset(ask)
    for theta in ask.size(THETAS, THETAS[:1]):
        settings = settings_for(ask.data, theta)
        feed = make_feed(settings, dataset, 0)
        alone = np.median([in_process(settings, feed) for _ in range(ask.size(5, 1))], axis=0)
        together = asyncio.run(spent(settings, feed))
        note = f"{dataset.name}, {together.exchanges} updates in 2 epochs, process start {together.start:.1f} s apart"
        plain = block_by_block(settings, feed)
        yield lower(
            f"drift.epoch.theta_{theta}.by_block",
            together.epoch_2,
            plain,
            "CPU s",
            "the same pass, in one process block by block",
        )
        if theta == THETA_LOCAL or ask.smallest:
            several = asyncio.run(spent(settings_for(ask.data, theta, LOCAL_UPDATES), feed))
            yield lower(
                f"drift.epoch.theta_{theta}.local_{LOCAL_UPDATES}",
                several.epoch_2,
                float(alone[1]),
                "CPU s",
                f"the same pass with drift.local_updates {LOCAL_UPDATES}",
            )
        agreed = together.epoch_1 - together.agreement
        yield lower(
            f"drift.epoch.theta_{theta}", together.epoch_2, float(alone[1]), "CPU s", f"a pass; {note}"
        )
        yield lower(
            f"drift.intake.theta_{theta}",
            agreed,
            float(alone[0]),
            "CPU s",
            f"first epoch with delivery; key agreement {together.agreement:.2f} s apart; {note}",
        )
        if theta == 2:
            share = together.security / (together.epoch_1 + together.epoch_2)
            yield lower(
                "drift.security_share",
                100 * share,
                1.52,
                "% of CPU",
                f"sealing and opening, of two epochs ({together.security:.3f} s); the paper's 1.52%; target < 2%",
            )


def growth_rows(ask: Ask) -> Iterator[Row]:
    """Measure how the cost of an epoch grows between 10 k and 100 k interactions."""
    sizes = ask.size((10_000, 30_000, 100_000), (200, 400))
    processes = ask.size(3, 1)
    costs = []
    for size in sizes:
        spec = SyntheticSpec(
            users=ask.size(size // 100, size // 20),
            items=ask.size(800, 40),
            interactions=size,
            genres=6,
            seed=0,
        )
        settings = settings_for(None, 8, owners=processes, owner_processes=processes)
        feed = make_feed(settings, generate(spec), 0)
        found = [asyncio.run(spent(settings, feed)) for _ in range(ask.size(3, 1))]
        # Processes' clocks count ticks: a cost below one tick would be 0.
        costs.append(max(float(np.median([one.epoch_1 for one in found])), 1 / _TICK))
    exponent = float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
    shown = ", ".join(f"{size / 1000:g} k: {cost:.2f} s" for size, cost in zip(sizes, costs, strict=True))
    yield lower(
        "drift.growth", exponent, 1.1, "exponent", f"CPU of an epoch by interactions ({shown}); target 1.1"
    )
