"""The drawn schedule of faults in its smallest form: a few short faults over one small federation."""

import asyncio
import random
from pathlib import Path

import pytest

from ..volumes import small_volume
from .fault_schedule import KINDS, Endurance, kinds_in_turn, summary

FEW = ("killed", "held still", "cut off")


@pytest.fixture
def _mounts(tmp_path: Path) -> None:
    """Skip where no disk of a size can be mounted, which the federation needs."""
    (tmp_path / "disk").mkdir()
    with small_volume(tmp_path / "disk", "1m"):
        pass


@pytest.mark.usefixtures("_mounts")
async def test_a_few_faults_over_a_small_federation_are_recovered_from_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    endurance = Endurance(tmp_path, (0.5, 1.0), tmp_path / "table.json")
    async with endurance.federation("FedNCF", False, "one", random.Random("smoke")) as one:
        assert set(FEW) < set(one.kinds())
        async with asyncio.timeout(300):
            for kind in FEW:
                assert await one.endure(one.draw(kind)), one._running.last_words()
            assert await one.what_is_left() == []
    assert endurance.well
    assert [row["kind"] for row in endurance.faults] == list(FEW)
    assert not any(row["lost"] or row["ended"] for row in endurance.faults)
    assert (tmp_path / "table.json").is_file()
    assert "| all | 3 |" in summary(endurance.faults)


def test_kinds_are_drawn_each_as_often_as_any_other() -> None:
    turn = kinds_in_turn(random.Random(1), KINDS)
    drawn = [next(turn) for _ in range(3 * len(KINDS))]
    assert all(drawn.count(kind) == 3 for kind in KINDS)
