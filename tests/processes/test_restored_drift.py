"""An orchestration server of DRIFT whose log was set back, as by a restored backup: owners and hosts are further."""

import re
import shutil
from typing import Any

import pytest

from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.operator_pb2_grpc import OperatorStub

from .patience import ANOTHER_FORM
from .test_disturbances import ROUNDING

COS = "cos/cos"
EPOCHS = 10
PUBLISHED, CLEAR, MASKED = ("published", "clear"), ("shielded", "clear"), ("shielded", "masked")


def settings_of(small, form, secure_sum, local_updates=1, **federation):
    shielded = {"form": "shielded", "k_min": 3, "window": 40} if form == "shielded" else {}
    own = {"local_updates": local_updates, "theta": 2} if local_updates > 1 else {}
    return small(
        secure_sum=secure_sum,
        drift={"dim": 8, "epochs": EPOCHS, **shielded, **own},
        federation={"owners": 3, "hosts": 3, "party_timeout_s": 5.0, "min_users": 10, **federation},
    )


def phase_of(form):
    return "epoch" if form == "published" else "visit"


class Backup:
    """A copy of what the COS of a federation had on disk at one time."""

    def __init__(self, running, folder):
        self.cos, self.folder = running.children[COS], folder
        self.cos.kill()
        shutil.copytree(self.cos.state, folder)
        self.cos.start()

    def restore(self):
        """Put the COS back to that time."""
        self.cos.kill()
        shutil.rmtree(self.cos.state)
        shutil.copytree(self.folder, self.cos.state)
        self.cos.start()


def says_what_is_lost(running, report, form, version):
    """Check that the log of the COS and the report name what was made after the backup, up to a version."""
    said = [line for line in running.log(COS) if line["event"].startswith("this server is behind ")]
    assert said, "what is lost is not in the log of the COS"
    if form == "published":
        # Owners that were away meanwhile have lost nothing.
        lost = {(one["owner"], one["first"], one["last"]) for one in report["lost_exchanges"]}
        assert lost
        assert {owner for owner, _, _ in lost} <= {int(slot) for slot in report["blocks"]}
        assert all(first <= last for _, first, last in lost)
        assert {one[1:] for one in lost} == {(line["first"], line["last"]) for line in said}
        return
    reasons = [one["reason"] for one in report["rounds"] if "as after a restore" in one["reason"]]
    assert len(reasons) == len(said)
    first, last, kept = map(
        int, re.search(r"sums (\d+) to (\d+) .* after (\d+) are lost", reasons[0]).groups()
    )
    assert kept < version
    formed = [one["round"] for one in report["rounds"] if not one["reason"]]
    assert formed == sorted(set(formed))
    assert not [number for number in formed if first <= number <= last]
    assert max(formed) > last


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "secure_sum", "local_updates"),
    [
        (*PUBLISHED, 5),
        pytest.param(*PUBLISHED, 1, marks=ANOTHER_FORM),
        pytest.param(*CLEAR, 1, marks=ANOTHER_FORM),
        (*MASKED, 1),
    ],
)
async def test_a_server_of_drift_whose_log_was_set_back_goes_on_and_says_what_is_lost(
    small, federation, tmp_path, form, secure_sum, local_updates
):
    # All of an owner's blocks count in each epoch, unless it is taken for lost.
    patient = {"party_timeout_s": 60.0} if form == "published" else {}
    async with federation(settings_of(small, form, secure_sum, local_updates, **patient)) as running:
        await running.start()
        await running.phase(phase_of(form), 2)
        backup = Backup(running, tmp_path / "backup")
        await running.phase(phase_of(form), 5)
        version = (await running.run_state()).version
        backup.restore()
        report = await running.finish()

    assert running.ended_well()
    assert (report["phase"], report["reason"]) == ("done", "")
    says_what_is_lost(running, report, form, version)
    if form == "published":
        # What is left counts once, each exchange whole.
        assert running.stores.counted_once()
        assert running.stores.gradients_differ_by() <= ROUNDING
        together = [len(exchange) for exchange in running.stores.exchanges()]
        assert sum(together) == report["version"]
        assert max(together) == local_updates
    epochs = [one["epoch"] for one in report["history"]]
    assert epochs == sorted(set(epochs))
    assert epochs[-1] == EPOCHS
    if secure_sum == "clear":
        assert epochs == list(range(1, EPOCHS + 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "secure_sum"),
    [PUBLISHED, pytest.param(*CLEAR, marks=ANOTHER_FORM), pytest.param(*MASKED, marks=ANOTHER_FORM)],
)
async def test_a_run_of_drift_that_was_resumed_is_resumed_once_more_after_its_log_was_set_back_to_its_failure(
    small, federation, tmp_path, form, secure_sum
):
    settings = settings_of(small, form, secure_sum)
    settings = settings.model_copy(
        update={"federation": settings.federation.model_copy(update={"give_up_s": 30.0})}
    )
    async with federation(settings) as running:
        await running.start()
        await running.phase(phase_of(form), 2)
        owners = running.parties("data-owner")
        for owner in owners:
            running.children[owner].kill()
        await running.ended()
        backup = Backup(running, tmp_path / "backup")
        for owner in owners:
            running.children[owner].start()
        await running.up(COS, *owners)
        await running.becomes("SERVING", *owners)
        await resumed(running)
        await running.phase(phase_of(form), 4)
        version = (await running.run_state()).version
        backup.restore()
        await running.up(COS)
        await running.becomes("SERVING", *owners)
        await resumed(running)
        report = await running.finish()

    assert running.ended_well()
    assert (report["phase"], report["reason"]) == ("done", "")
    assert [" for 30 s; no data owner is there" in one["failure"] for one in report["resumes"]] == [True]
    says_what_is_lost(running, report, form, version)


async def resumed(running):
    """Resume the run, which has failed, and follow it again."""
    assert (await running.run_state()).resumable
    channel = running.channel(COS)
    stub: Any = channel.stub(OperatorStub)
    await stub.ResumeRun(wire.ResumeRunRequest(run_id="test"))
    await channel.close()
    running.follow_again()
