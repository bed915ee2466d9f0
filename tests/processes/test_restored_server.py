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


async def restored(running, backup, *, further):
    """Let a run be so many rounds further than the backup to which its server then goes back; return the last round."""
    await running.start()
    await running.a_round("a round before the backup", reason="")
    cos = running.children[COS]
    cos.kill()
    shutil.copytree(cos.state, backup)
    cos.start()
    for number in range(further):
        await running.a_round(f"round {number} after the backup", reason="")
    last = max(event.round.round for event in running.events)
    cos.kill()
    shutil.rmtree(cos.state)
    shutil.copytree(backup, cos.state)
    cos.start()
    return last


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
async def test_a_server_restored_from_a_backup_goes_on_where_its_parties_are(
    small, federation, tmp_path, secure_sum
):
    async with federation(settings_of(small, secure_sum)) as running:
        further = await restored(running, tmp_path / "backup", further=6)
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


async def test_hosts_that_share_the_key_do_not_go_back_to_an_older_version_of_the_model(
    small, federation, tmp_path
):
    """Without that, as under the sums above, a server would get further sums of a version that was summed already."""
    async with federation(settings_of(small, "shared-key")) as running:
        last = await restored(running, tmp_path / "backup", further=3)
        await running.ended()
        report = await running.report()
        await running.stop()
        told = [line for host in running.parties("client") for line in running.log(host)]

    refusals = {str(line["reason"]) for line in told if "reason" in line}
    assert any("the server went back to the model that round" in reason for reason in refusals), refusals
    assert report["phase"] == "failed"
    assert [one for one in report["rounds"] if one["round"] > last]
    assert not [one for one in report["rounds"] if one["round"] > last and not one["reason"]]
