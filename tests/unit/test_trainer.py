"""A data owner of DRIFT's published form that trains: what is refused as stale is computed again, whole."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from coterie_data_owner.drift import trainer
from coterie_data_owner.drift.trainer import Trainer

from coterie.systems.drift.blocks import Block
from coterie.systems.drift.settings import DriftSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire

DIM = 4
LOCAL_UPDATES = 3
ID_BYTES = 8 * (1 + DIM)


class Exchanging:
    """The COS's side of exchanges: it refuses the first gradients as stale, and takes the blocks that follow."""

    def __init__(self, came):
        self.came, self.progress, self.sizes, self.stale = came, wire.OwnerProgress(), [], 0

    async def exchange(self, request):
        if request.HasField("gradient"):
            gradients = [request.gradient, *request.further]
            if not self.stale:
                self.stale = len(gradients)
                # Records that came meanwhile change what is drawn.
                self.came()
                raise Refusal(ErrorReason.ERROR_REASON_STALE, "the gradient was computed on old rows")
            for one in gradients:
                assert one.first_block == self.progress.blocks
                self.progress.blocks += one.blocks
            self.progress.epoch, self.progress.sequence = gradients[0].epoch, request.sequence
            self.sizes.append(len(gradients))
        users, items = (
            len(from_wire(ids, np.uint32, (None,), field="ids")) for ids in (request.users, request.items)
        )
        return wire.ExchangeResponse(
            version=self.progress.sequence,
            user_rows=to_wire(np.ones((users, DIM), np.float32)),
            item_rows=to_wire(np.ones((items, DIM), np.float32)),
            progress=self.progress,
        )


@pytest.mark.parametrize("more", [0, 1])
async def test_gradients_that_are_refused_as_stale_are_computed_again_of_all_their_blocks(monkeypatch, more):
    # Just what the updates of an exchange take: a user and two items each.
    monkeypatch.setattr(trainer, "MOST_EXCHANGED", LOCAL_UPDATES * 3 * ID_BYTES)
    blocks = [Block(user, (2 * user,), (2 * user + 1,)) for user in range(7)]
    drawn = []

    def draw(block, epoch):
        # First an item of the block, then perhaps one whose row has to be asked for, too.
        return block._replace(unseen=(100 if drawn else block.negatives[0],))

    owner = SimpleNamespace(
        name="owner",
        slot=1,
        sequence=0,
        blocks=blocks,
        flushed=True,
        dropped=0,
        changed=asyncio.Event(),
        draw=draw,
    )
    settings = DriftSettings(dim=DIM, theta=1, local_updates=LOCAL_UPDATES, unseen="own", unseen_each=1)
    plan = wire.RunPlan(
        run_id="run",
        system="drift",
        form=settings.form,
        dim=settings.dim,
        rate=settings.rate,
        ridge=settings.ridge,
        theta=settings.theta,
        epochs=settings.epochs,
        max_staleness=settings.max_staleness,
        settings=settings.for_plan(),
    )
    said = []

    async def submit(kind, round_, status, slots):
        said.append((round_.round, status.blocks))

    party = SimpleNamespace(plan=plan, submit=submit)
    cos = Exchanging(lambda: drawn.extend([True] * more))
    await Trainer(owner, party, cos, None, Accounting(), lambda: True).intake(1)
    assert cos.stale == cos.sizes[0] == LOCAL_UPDATES
    assert cos.progress.blocks == len(blocks)
    assert owner.sequence == len(cos.sizes)
    assert said == [(1, len(blocks))]
