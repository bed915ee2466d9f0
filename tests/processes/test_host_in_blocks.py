"""Hosts whose users are read from files some at a time: the numbers of a run in memory, also after a crash."""

import os
import stat

import pytest

from coterie.errors import StoreError
from coterie.launch.state_check import check_state
from coterie.store.user_records import RECORDS, RecordFile
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed

from .host_in_blocks import InBlocks

HOST, OTHER = "client/host-0", "client/host-1"
SAME = ("epoch", "version", "users", "metrics")


@pytest.fixture
def in_blocks(small, tmp_path):
    """Return a function that gives a federation whose hosts have more users than they keep in memory."""

    def made(passes):
        settings = small(
            system="fedncf",
            secure_sum="masked",
            split={"kind": "leave-last-out"},
            data={"synthetic": {"users": 40, "items": 70, "interactions": 900}},
            rounds={"cohort": 40, "group": 40, "passes": passes, "evaluate_every": 2},
            federation={"hosts": 2},
        )
        return InBlocks(settings, make_feed(settings, load(settings), 0), tmp_path / "run")

    return made


@pytest.mark.long
async def test_hosts_in_blocks_come_to_the_numbers_of_one_process(in_blocks):
    async with in_blocks(4) as running:
        await running.start()
        report = await running.finish()
        await running.stop()
    clear = running.settings.model_copy(update={"secure_sum": "clear"})
    alone = train_in_process(clear, running.feed, run_id="test", seed=0, see=lambda event: None).known
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    found, expected = (
        [{key: one[key] for key in SAME} for one in each["history"]] for each in (report, alone)
    )
    assert found == expected
    assert report["chosen"] == alone["chosen"]

    state = running.children[HOST].state
    records = state / RECORDS
    assert stat.S_IMODE(records.stat().st_mode) == 0o600
    assert {one.status for one in check_state(state)} == {"ok"}
    flip(records)
    (failed,) = [one for one in check_state(state) if one.status != "ok"]
    assert str(records) in failed.problem
    assert "makes it again" in failed.fix


@pytest.mark.long
async def test_a_host_that_is_started_again_takes_its_file_or_makes_a_damaged_one_again(in_blocks):
    async with in_blocks(5000) as running:
        await running.start()
        await running.a_round("a round", purpose="train", reason="")
        damaged, whole = (running.children[one].state / RECORDS for one in (HOST, OTHER))
        for host in (HOST, OTHER):
            running.children[host].kill()
        flip(damaged)
        before = written(damaged), written(whole)
        for host in (HOST, OTHER):
            running.children[host].start()
        await running.until(
            lambda event: written(damaged) not in (0, before[0]), "the damaged file was made again"
        )
        version = (await running.run_state()).version
        await running.until(lambda event: event.round.version > version + 1, "rounds with both hosts")
        assert (written(damaged) != before[0], written(whole) == before[1]) == (True, True)
        await running.stop()
    assert running.ended_well()
    assert {one["file"] for one in running.log(HOST) if "made again" in one["event"]} == {str(damaged)}
    assert not [one for one in running.log(OTHER) if "made again" in one["event"]]


@pytest.mark.long
async def test_a_host_whose_file_is_damaged_while_it_runs_ends_by_its_name_and_makes_it_again_at_its_start(
    in_blocks,
):
    async with in_blocks(5000) as running:
        await running.start()
        await running.a_round("a round", purpose="train", reason="")
        host = running.children[HOST]
        records = host.state / RECORDS
        with records.open("r+b") as file:
            # The beginning of the last record's items, of whatever user it is.
            file.seek(-3, os.SEEK_END)
            (last,) = file.read(1)
            file.seek(-3, os.SEEK_END)
            file.write(bytes([last ^ 4]))
        await running.comes_true(lambda: not host.alive, "the host ends")
        assert host.process.returncode == StoreError.exit_code
        assert f"{records} is damaged: the record of a user does not have its checksum" in host.last_words()
        host.start()
        version = (await running.run_state()).version
        await running.until(lambda event: event.round.version > version + 1, "rounds with both hosts")
        assert RecordFile(records).check() == 0
        await running.stop()
    assert not any(child.process.returncode for child in running.children.values())


@pytest.mark.long
async def test_a_host_of_few_users_keeps_no_file_of_a_time_when_it_had_many(small, federation):
    settings = small(
        system="fedncf",
        secure_sum="clear",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 40, "items": 70, "interactions": 900}},
        rounds={"cohort": 40, "group": 40, "passes": 5000, "evaluate_every": 5000},
        federation={"hosts": 2},
    )
    async with federation(settings, hold=[HOST]) as running:
        await running.start()
        left = [running.children[HOST].state / name for name in (RECORDS, f".{RECORDS}.k1lled")]
        for one in left:
            one.parent.mkdir(mode=0o700, exist_ok=True)
            one.write_bytes(b"of users who are gone")
            one.chmod(0o600)
        running.release(HOST)
        await running.a_round("a round", purpose="train", reason="")
        assert not any(one.exists() for one in left)
        await running.stop()
    assert running.ended_well()


def written(path):
    """Return when a file was written, nanoseconds; 0 where there is none at the moment."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
