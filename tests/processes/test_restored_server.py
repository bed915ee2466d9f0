"""An orchestration server restored from a backup: its members say where they are, and it goes on from there."""

import shutil

import pytest

COS = "cos/cos"


def settings_of(small, secure_sum, **changes):
    return small(
        system="fedncf",
        secure_sum=secure_sum,
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 24, "items": 60, "interactions": 600}},
        rounds={"cohort": 24, "group": 24, "passes": 60, "evaluate_every": 20},
        federation={"hosts": 4, "party_timeout_s": 5.0},
        encryption={"bits": 1024, "comparison": True},
        **changes,
    )


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
async def test_a_server_restored_from_a_backup_goes_on_where_its_parties_are(
    small, federation, tmp_path, secure_sum
):
    async with federation(settings_of(small, secure_sum)) as running:
        await running.start()
        await running.a_round("a round before the backup", reason="")
        cos = running.children[COS]
        cos.kill()
        shutil.copytree(cos.state, tmp_path / "backup")
        cos.start()
        for number in range(6):
            await running.a_round(f"round {number} after the backup", reason="")
        further = max(event.round.round for event in running.events)
        cos.kill()
        shutil.rmtree(cos.state)
        shutil.copytree(tmp_path / "backup", cos.state)
        cos.start()
        report = await running.finish()

    assert report["phase"] == "done"
    said = [
        line for line in running.log(COS) if line["event"].startswith("this server is behind its parties")
    ]
    assert said, "how far its parties are is in the log"
    # Rounds of the backup, one or a few that its parties refused, and those after theirs.
    numbers = [one["round"] for one in report["rounds"] if not one["reason"]]
    assert numbers == sorted(set(numbers))
    assert max(numbers) > further
    lost = [number for number in range(numbers[0], further + 1) if number not in numbers]
    assert lost, "what was made after the backup is not in the report"
    assert sum(line["passes_lost"] for line in said) >= 1
    assert report["chosen"] is not None
