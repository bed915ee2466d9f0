"""An orchestration server of DRIFT whose log was set back, as by a restored backup: owners and hosts are further."""

import json
import shutil

import pytest

COS = "cos/cos"
FORMS = [("published", "clear"), ("shielded", "clear"), ("shielded", "masked")]


def settings_of(small, form, secure_sum, epochs):
    shielded = {"form": "shielded", "k_min": 3, "window": 40} if form == "shielded" else {}
    return small(
        secure_sum=secure_sum,
        drift={"dim": 8, "epochs": epochs, **shielded},
        federation={"owners": 3, "hosts": 3, "party_timeout_s": 5.0, "min_users": 10},
    )


def phase_of(form):
    return "epoch" if form == "published" else "visit"


@pytest.mark.parametrize(("form", "secure_sum"), FORMS)
async def test_a_server_of_drift_whose_log_was_set_back_goes_on_and_says_which_updates_are_lost(
    small, federation, tmp_path, form, secure_sum
):
    settings = settings_of(small, form, secure_sum, epochs=12)
    async with federation(settings) as running:
        await running.start()
        await running.phase(phase_of(form), 2)
        cos = running.children[COS]
        cos.kill()
        backup = tmp_path / "backup"
        shutil.copytree(cos.state, backup)
        cos.start()
        await running.phase(phase_of(form), 5)
        version = (await running.run_state()).version
        cos.kill()
        shutil.rmtree(cos.state)
        shutil.copytree(backup, cos.state)
        cos.start()
        report = await running.finish()
    print(json.dumps(report["history"][-1]), version)
    for line in running.log(COS):
        if line["level"] != "info":
            print(line)
    assert running.ended_well()
    assert (report["phase"], report["reason"]) == ("done", "")
    assert [one["epoch"] for one in report["history"]] == list(range(1, 13))
