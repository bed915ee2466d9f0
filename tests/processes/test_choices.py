"""What a person has chosen is heeded by systems without rounds, too: DRIFT sends nothing about who has paused."""

import asyncio

import pytest

from coterie.cli.main import invoke
from coterie.net.enrolment import saved_bundles

from .stores import rows

FORMS = {
    "published": {"drift": {"dim": 8, "epochs": 2}},
    "shielded": {"drift": {"form": "shielded", "dim": 8, "epochs": 3, "k_min": 3, "window": 40}},
}
TABLES = {"published": "batches", "shielded": "visits"}


def messages_of(running, host, form):
    """Return how many batches or visits owners hold of a host's users, and of all others."""
    own = {one.participant_id for one in saved_bundles(running.children[host].state)}
    query = f'SELECT "user" FROM {TABLES[form]}'
    users = [
        user
        for owner in running.parties("data-owner")
        for (user,) in rows(running.children[owner].state / "data_owner.db", query)
    ]
    return sum(user in own for user in users), sum(user not in own for user in users)


@pytest.mark.parametrize("form", FORMS)
async def test_owners_get_nothing_of_who_has_paused_and_all_of_it_once_it_goes_on(small, federation, form):
    settings = small(**FORMS[form], federation={"owners": 2, "hosts": 3})
    async with federation(settings, hold=["client/host-0"]) as running:
        await running.start()
        paused = running.children["client/host-0"]
        paused.state.mkdir(mode=0o700, exist_ok=True)
        config = str(paused.folder / "config.toml")
        assert await asyncio.to_thread(invoke, ["participate", "--config", config, "--pause"]) == 0
        running.release("client/host-0")
        await running.ended()
        own, others = messages_of(running, "client/host-0", form)
        assert own == 0
        assert others > 0
        assert await asyncio.to_thread(invoke, ["participate", "--config", config, "--resume"]) == 0
        await running.comes_true(
            lambda: messages_of(running, "client/host-0", form)[0] > 0,
            "owners have records of the host that goes on",
        )
        assert messages_of(running, "client/host-0", form)[1] == others
        report = await running.finish()
    assert report["phase"] == "done"


async def test_an_owner_that_comes_back_gets_no_visit_of_who_left_meanwhile(small, federation):
    drift = {**FORMS["shielded"]["drift"], "epochs": 15}
    async with federation(small(drift=drift, federation={"owners": 2, "hosts": 3})) as running:
        await running.start()
        away = running.children[running.parties("data-owner")[0]]
        await running.comes_true(
            lambda: messages_of(running, "client/host-0", "shielded")[0] > 10, "visits of the host"
        )
        away.kill()
        config = str(running.children["client/host-0"].folder / "config.toml")
        assert await asyncio.to_thread(invoke, ["participate", "--config", config, "--leave", "--yes"]) == 0
        # What is on its way to owners that are there still arrives.
        await asyncio.sleep(2)
        before = messages_of(running, "client/host-0", "shielded")[0]
        away.start()
        await running.ended()
        assert messages_of(running, "client/host-0", "shielded")[0] == before
        await running.finish()
