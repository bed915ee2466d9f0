"""Key holders and item servers whose volume fills up in the middle of a run: they live, wait for room, and go on."""

import contextlib

import pytest

from ..volumes import fill, small_volume

HOLDERS = [f"decrypting-client/key-{n}" for n in range(3)]
OWNER = "data-owner/catalogue"
ROUNDS = {"cohort": 20, "group": 20, "passes": 5000, "evaluate_every": 5000, "step_timeout_s": 4.0}


def said(running, party, event):
    return [line for line in running.log(party) if line["event"] == event]


def encrypted(small, **federation):
    """Return the settings of a run whose sums three key holders decrypt."""
    return small(
        system="fedncf",
        secure_sum="encrypted",
        encryption={"bits": 1024, "comparison": True},
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 40, "items": 60, "interactions": 900}},
        rounds=ROUNDS,
        federation={"hosts": 3, "most_abandoned": 100, **federation},
    )


@pytest.mark.long
async def test_key_holders_without_room_live_and_go_on_once_there_is_some(small, federation):
    settings = encrypted(small)
    async with federation(settings) as running:
        with contextlib.ExitStack() as volumes:
            for holder in HOLDERS:
                state = running.folder / f"{holder.removeprefix('decrypting-client/')}" / "state"
                volumes.enter_context(small_volume(state, "2m"))
            await running.start()
            assert {running.children[holder].state for holder in HOLDERS} == {
                running.folder / holder.removeprefix("decrypting-client/") / "state" for holder in HOLDERS
            }
            await running.a_round("a round", reason="")
            ballast = [fill(running.children[holder].state) for holder in HOLDERS]
            await running.becomes("NOT_SERVING", *HOLDERS)
            for holder in HOLDERS:
                assert 'coterie_condition{condition="store"} 0.0' in running.page(holder)
            # What they cannot keep they do not sign: the sum is not formed.
            await running.until(lambda event: event.round.reason, "a sum that is not formed")
            assert all(running.children[holder].alive for holder in HOLDERS)
            for file in ballast:
                file.unlink()
            await running.becomes("SERVING", *HOLDERS)
            await running.a_round("a round once there is room", reason="")
            await running.stop()
    assert running.ended_well()


@pytest.mark.long
async def test_a_key_holder_that_starts_while_the_third_party_is_away_waits_for_it(small, federation):
    settings = encrypted(small, party_timeout_s=5.0)
    thirdparty = "thirdparty/directory"
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        running.children[thirdparty].kill()
        for holder in HOLDERS:
            running.children[holder].kill()
        await running.waits("0 of 3 key holders are present", *HOLDERS)
        for holder in HOLDERS:
            running.children[holder].start()
        for holder in HOLDERS:
            await running.comes_true(
                lambda holder=holder: said(running, holder, "no paillier key yet"),
                f"{holder} says why it waits",
            )
        assert all(running.children[holder].alive for holder in HOLDERS)
        running.children[thirdparty].start()
        await running.a_round("a round with all of them back", reason="")
        await running.stop()
    assert running.ended_well()


@pytest.mark.long
async def test_an_item_server_without_room_is_done_without_and_told_of_items_again_later(small, federation):
    settings = small(
        system="fedmvmf",
        split={"kind": "random"},
        data={"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
        mvmf={"factors": 4, "ridge": 3.0},
        rounds=ROUNDS,
        federation={"hosts": 3},
    )

    def trained(silent):
        seen = max((event.number for event in running.events), default=0)
        return lambda event: (
            event.number > seen
            and event.round.purpose == "train"
            and not event.round.reason
            and list(event.round.silent_owners) == silent
        )

    async with federation(settings) as running:
        state = running.folder / "owner-catalogue" / "state"
        with small_volume(state, "2m"):
            await running.start()
            assert running.children[OWNER].state == state
            await running.until(trained([]), "a round with what is known of items")
            ballast = fill(state)
            await running.until(trained(["catalogue"]), "a round without")
            await running.becomes("NOT_SERVING", OWNER)
            assert running.children[OWNER].alive
            ballast.unlink()
            await running.becomes("SERVING", OWNER)
            await running.until(trained([]), "a round with it again")
            report = await running.report()
            await running.stop()
    assert report["abandoned"] == 0
    assert running.ended_well()
