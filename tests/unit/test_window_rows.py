"""Rows that a data owner offers to a window: what becomes of them, by what the server says and the owner revealed."""

from pathlib import Path

import numpy as np
import pytest
from coterie_data_owner.drift.holdings import Arrival, Holdings, ItemRows
from coterie_data_owner.drift.learning_owner import LearningOwner
from coterie_data_owner.drift.prekeys import Prekeys
from coterie_data_owner.owner import Owner

from coterie.crypto.sealed import encode_records
from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Journal
from coterie.secure_sum.plan import Member, SumPlan
from coterie.store.engine import Writer, open_sqlite
from coterie.systems.drift.settings import DriftSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie.wire.visit import Visit
from tests.simulation.rig.sums import identity

ITEMS = ["a", "b", "c"]
SETTINGS = DriftSettings(form="shielded", dim=2, rate=0.25, ridge=0.0, k_min=1)
ROUND = 4


class Stand:
    """An owner's holdings on a real store, with a row that a user's visit has left."""

    def __init__(self, folder: Path) -> None:
        self.engine = open_sqlite(folder / "data_owner.db", "data_owner")
        self.writer = Writer(self.engine)
        one = identity(0)
        owner = Owner("zoo", one, one.bundle(1, (0, 2**40)), ITEMS)
        self.learning = LearningOwner(owner, Prekeys(one, "run", folder / "prekeys", 1.0))
        self.learning.slot = 0
        self.learning.learn_slots({b"u" * 32: 1})
        plan = RunPlan(
            run_id="run",
            system="drift",
            form="shielded",
            dim=SETTINGS.dim,
            rate=SETTINGS.rate,
            theta=SETTINGS.theta,
            epochs=SETTINGS.epochs,
            settings=SETTINGS.for_plan(),
        )
        self.holdings = Holdings(self.learning, plan, self.writer, Accounting(), self._refresh)

    async def _refresh(self) -> None:
        raise AssertionError("nothing is newer")

    async def visited(self) -> None:
        items = np.zeros((len(ITEMS), 2), np.float32)
        await self.holdings.told(ItemRows(0, b"m" * 32, items), 0, 0)
        records = encode_records(np.array([0, 1], np.uint32), np.array([False, True]))
        await self.holdings.take(
            [Arrival(b"u" * 32, 1, Visit(1, 1, True, np.ones(2, np.float32)), 1, 2, records)]
        )

    async def offered(self, *, revealed: bool) -> Journal:
        """Offer the rows to a window, and help to reveal it or not."""
        plan = SumPlan(
            "run", ROUND, "window", "masked", bytes(32), bytes(32), (Member(bytes(32), "d"),), part=ROUND
        )
        ledger = Ledger().with_revealed(plan, b"r" * 32) if revealed else Ledger()
        async with self.holdings.undisturbed():
            codes, released = self.holdings.contribution(plan)
            assert len(released.items)
            assert codes.any()
            for journal, rows in (
                (Journal(ROUND, b"c"), released),
                (Journal(ROUND, b"c", ledger), None),
            ):
                await self.writer.run(self.holdings.write_of(journal, rows))
                self.holdings.stored(journal, rows)
        return self.holdings.journal()


@pytest.fixture
async def stand(tmp_path):
    made = Stand(tmp_path)
    await made.visited()
    yield made
    made.writer.close()
    made.engine.dispose()


@pytest.mark.parametrize(
    ("revealed", "summed", "held"),
    [(False, 0, True), (False, ROUND, False), (True, 0, False), (True, ROUND, False)],
    ids=["abandoned-before", "applied-before", "abandoned-after", "applied-after"],
)
async def test_rows_are_held_again_only_when_their_window_was_abandoned_before_it_was_revealed(
    stand, revealed, summed, held
):
    before = stand.holdings.held
    journal = await stand.offered(revealed=revealed)
    assert (journal.ledger.last("window") is not None) == revealed
    assert stand.holdings.held == 0
    await stand.holdings.told(stand.holdings.model, ROUND, summed)
    assert stand.holdings.held == (before if held else 0)
    # The store says the same after a restart.
    with stand.engine.connect() as connection:
        stand.holdings.rebuild(connection)
    assert stand.holdings.held == (before if held else 0)
    assert stand.holdings.journal().ledger == journal.ledger
