"""Runs of DRIFT wait for parties that are all away, for longer than a phase may take, and end as usual afterwards."""

import asyncio

import pytest

from .patience import ANOTHER_FORM

PHASE_S = 30.0
"""Longest duration of a phase of these runs, seconds; everybody is away for longer."""

FORMS = [
    ("published", "clear"),
    pytest.param("shielded", "clear", marks=ANOTHER_FORM),
    ("shielded", "masked"),
]


def settings_of(small, form, secure_sum, epochs=8):
    shielded = {"form": "shielded", "k_min": 3, "window": 40} if form == "shielded" else {}
    return small(
        secure_sum=secure_sum,
        drift={"epochs": epochs, **shielded},
        federation={
            "owners": 3,
            "hosts": 3,
            "party_timeout_s": 3.0,
            "phase_timeout_s": PHASE_S,
            "min_users": 10,
        },
    )


def has_begun(form):
    """Return the phase, with its epoch, in which parties go away."""
    return ("epoch", 2) if form == "published" else ("visit", 2)


@pytest.mark.long
@pytest.mark.parametrize(("form", "secure_sum"), FORMS)
async def test_while_all_owners_are_away_for_long_a_run_waits_and_then_goes_on(
    small, federation, form, secure_sum
):
    async with federation(settings_of(small, form, secure_sum, epochs=12)) as running:
        await running.start()
        await running.phase(*has_begun(form))
        owners = running.parties("data-owner")
        for owner in owners:
            running.children[owner].kill()
        await running.waits("no data owner is there", *owners)
        await asyncio.sleep(PHASE_S + 3)
        assert await running.health("cos/cos") == "SERVING"
        state = await running.run_state()
        assert state.waiting.startswith("no data owner is there")
        assert "coterie_runs_waiting 1.0" in running.page("cos/cos")
        for owner in owners:
            running.children[owner].start()
        report = await running.finish()

    assert running.ended_well()
    assert (report["phase"], report["reason"]) == ("done", "")
    assert len(report["history"]) == 12
    # On a busy machine owners count as lost one after the other, and it says anew for whom it waits.
    said = [bool(one["reason"]) for one in report["waits"]]
    assert said == [True] * (len(said) - 1) + [False]
    assert len(said) > 1


@pytest.mark.long
@pytest.mark.parametrize(("form", "secure_sum"), FORMS)
async def test_while_all_hosts_are_away_for_long_a_run_waits_before_its_end(
    small, federation, form, secure_sum
):
    async with federation(settings_of(small, form, secure_sum)) as running:
        await running.start()
        await running.phase(*has_begun(form))
        hosts = running.parties("client")
        for host in hosts:
            running.children[host].kill()
        await running.waits("missing: client/host-0, client/host-1, client/host-2")
        await asyncio.sleep(PHASE_S + 3)
        for host in hosts:
            running.children[host].start()
        report = await running.finish()

    assert running.ended_well()
    assert (report["phase"], report["reason"]) == ("done", "")
    last = report["history"][-1]
    assert last["epoch"] == 8
    assert last["metrics"]
    # A run that has ended does not say that it goes on.
    said = [bool(one["reason"]) for one in report["waits"]]
    assert said[0]
    assert all(said[:-1])


@pytest.mark.long
@pytest.mark.parametrize(("form", "secure_sum"), FORMS[::2])
async def test_a_run_gives_up_after_the_time_that_its_settings_say_and_names_whom_it_waited_for(
    small, federation, form, secure_sum
):
    settings = settings_of(small, form, secure_sum, epochs=500)
    settings = settings.model_copy(
        update={"federation": settings.federation.model_copy(update={"give_up_s": 5.0})}
    )
    async with federation(settings) as running:
        await running.start()
        await running.phase(*has_begun(form))
        owners = running.parties("data-owner")
        for owner in owners:
            running.children[owner].kill()
        await running.ended()
        page = running.page("cos/cos")
        report = await running.finish()

    assert [
        f'coterie_runs_ended{{outcome="{one}"}} {number}' in page
        for one, number in (("done", "0.0"), ("resumable", "1.0"), ("failed", "0.0"))
    ] == [True] * 3
    assert report["phase"] == "failed"
    assert "for 5 s; no data owner is there; missing: " in report["reason"]
    assert all(owner in report["reason"] for owner in owners)
