"""A COS that lies reads one user's items off its sums, in federations whose other parties are all real.

Each test tells how accurate an attack is (`attack`), and whether any party noticed.  A lie that is refused gives an
accuracy of `NOTHING`, and a reason on the victim's receipt, as the last test here shows.
"""

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from coterie.rounds.training import Purpose
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedncf.purposes import layout_of
from coterie.systems.fedncf.settings import FedNcfSettings

from .lying.federation import Lied
from .lying.lies import (
    AskedTwice,
    Lie,
    NoRate,
    OneBehind,
    OneHolder,
    OpenToOne,
    OtherItems,
    OtherModels,
    OtherOrder,
    OtherRows,
    PosingAsOwner,
    SecondList,
)
from .lying.revealed import Revealed
from .stores import rows

USERS_AT = (13, 10, 1)
"""Users of each host.  The last host is the victim's, whose only user shares sums with 23 others."""

MANY = (4, 4, 4, 4, 4, 3, 1)
"""Users of so many hosts that one of them may be missing from a masked sum."""

DATA = {"items": 100, "interactions": 500, "seed": 2}
"""The last user has 13 training items, some of which only one or two others have."""

STEP = layout_of(FedNcfSettings(), Purpose.TRAIN, DATA["items"])["items"].step
"""Difference of two neighbouring values that a change of a row may have."""

KEY = {"bits": 1024, "comparison": True}
"""Short keys, drawn quickly."""


@dataclass(frozen=True)
class Accuracy:
    """How well an attack found the victim's training items: the shares found, and right among those named."""

    recall: float
    precision: float


NOTHING = Accuracy(0.0, 0.0)


@dataclass(frozen=True)
class Attacked:
    """The outcome of an attack.

    Parameters
    ----------
    accuracy : Accuracy
    phase : str
        How the run ended.
    abandoned : list of str
        Why rounds were abandoned.
    declined : dict of str to list of str
        Why hosts and key holders sat out, by party.
    """

    accuracy: Accuracy
    phase: str
    abandoned: list[str]
    declined: dict[str, list[str]]

    def noticed(self) -> bool:
        """Whether anybody noticed: a party that sat out, a round that was abandoned, a run that failed."""
        return bool(self.declined or self.abandoned) or self.phase != "done"


@pytest.fixture
def under(small, tmp_path):
    """Return a function that makes a federation whose COS tells a lie; it gives up when parties stay away for long."""

    def make(
        lie: type[Lie],
        secure_sum: str = "masked",
        users_at: Sequence[int] = USERS_AT,
        *,
        ends_after_s: float = 600.0,
        **options: Any,
    ) -> Lied:
        users = sum(users_at)
        settings = small(
            system="fedncf",
            secure_sum=secure_sum,
            split={"kind": "leave-last-out"},
            data={"synthetic": {"users": users, **DATA}},
            rounds={"cohort": users, "group": users, "passes": 1, "evaluate_every": 1},
            federation={
                "hosts": len(users_at),
                "phase_timeout_s": ends_after_s,
                "give_up_s": ends_after_s,
                # A sum that honest parties refuse twice they refuse a third time.
                "most_abandoned": 2,
            },
            encryption=KEY,
        )
        feed = make_feed(settings, load(settings), 0)
        feed = dataclasses.replace(feed, host=np.repeat(np.arange(len(users_at)), users_at))
        return Lied(settings, feed, tmp_path, lie, f"client/host-{len(users_at) - 1}", **options)

    return make


OTHERS = ("client/host-0", "client/host-1")
VICTIM = "client/host-2"


async def refused(lied: Lied) -> Attacked:
    """Run a federation under a lie that keeps any sum from being formed, and return what its parties say."""
    attacked = await attack(lied, supported)
    assert attacked.accuracy == NOTHING
    assert attacked.phase == "failed"
    assert lied.revealed() == []
    # A party may have been asked for several sums before the run ends.
    declined = {party: sorted(set(reasons)) for party, reasons in attacked.declined.items()}
    return dataclasses.replace(attacked, declined=declined)


async def attack(
    lied: Lied,
    found_in: Callable[[Sequence[Revealed]], set[str]],
    *,
    truth: Callable[[Lied], set[str]] = Lied.training_items,
    meanwhile: Callable[[Lied], Awaitable[None]] | None = None,
) -> Attacked:
    """Run a federation to its end, and compare what the COS finds in sums with the victim's training items.

    Parameters
    ----------
    lied : Lied
        Not started.
    found_in : callable
        Given all sums that the COS has seen, returns the keys of the items that the victim has; empty where the sums
        that tell of it were not formed.
    truth : callable
        Given the federation, returns the keys of the items that the attack is to find.
    meanwhile : callable, optional
        Given the federation, does what the COS waits for.
    """
    async with lied:
        await lied.start()
        if meanwhile is not None:
            await meanwhile(lied)
        report = await lied.finish()
    assert lied.ended_well()
    found, wanted = found_in(lied.revealed()), truth(lied)
    right = len(found & wanted)
    accuracy = Accuracy(right / len(wanted), right / max(len(found), 1))
    return Attacked(accuracy, report["phase"], lied.abandoned(), lied.declined())


def keys(one: Revealed, chosen: np.ndarray) -> set[str]:
    """Return the keys of chosen items; given is a truth value for each."""
    return {key for key, yes in zip(one.items, chosen.tolist(), strict=True) if yes}


def of_purpose(sums: Sequence[Revealed], purpose: Purpose) -> list[Revealed]:
    """Return the sums of a purpose, in the order in which they were formed."""
    return [one for one in sums if one.purpose == purpose.value]


# --- 1a: another catalogue for everybody else --------------------------------------------------------------------


def supported(sums: Sequence[Revealed]) -> set[str]:
    """Return the items of the first sum of items: all are the victim's where nobody else knows them."""
    for one in of_purpose(sums, Purpose.SUPPORTS)[:1]:
        return keys(one, one.sums["supports"] > 0)
    return set()


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
async def test_hosts_that_are_told_other_items_than_the_operator_signed_are_in_no_sum(under, secure_sum):
    attacked = await refused(under(OtherItems, secure_sum))
    reason = "the items that the server names for data owner 'catalogue' are not those of the signed plan"
    assert all(attacked.declined[other] == [reason] for other in OTHERS)


@pytest.mark.parametrize("thorough", [False, True], ids=["one-plan", "a-plan-for-each"])
@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
async def test_hosts_that_are_told_the_items_in_another_order_are_in_no_sum(under, secure_sum, thorough):
    attacked = await refused(under(OtherOrder, secure_sum, thorough=thorough))
    if not thorough:
        reason = "the input 'catalogue' that the server sent is not the one of the sum's plan"
        assert all(attacked.declined[other] == [reason] for other in OTHERS)
    elif secure_sum == "masked":
        assert all("for this plan" in reason for reasons in attacked.declined.values() for reason in reasons)
        assert attacked.declined.keys() >= {VICTIM}
    else:
        # Holders find ciphertexts under the pads of other plans in the sum.
        assert {"is asked to decrypt what is not the sum over those that it confirmed"} <= {
            reason for reasons in attacked.declined.values() for reason in reasons
        }


async def test_the_same_sum_of_a_server_that_tells_the_truth_is_of_everybody(under):
    attacked = await attack(under(Lie), supported)
    assert attacked.accuracy.recall == 1
    assert attacked.accuracy.precision < 0.2
    assert not attacked.noticed()


# --- 1b: items that are open to one host only --------------------------------------------------------------------


def liked(sums: Sequence[Revealed]) -> set[str]:
    r"""Return the items with which a user interacted, from the changes of rows that it alone made in its first step.

    In GMF the change of item :math:`i` is :math:`c (y_i - \sigma(z_i)) k_i (h \odot p)`: one direction for all items,
    positive for an interaction (:math:`y_i = 1`), negative for :math:`k_i` drawn negatives (`gradients` and
    `_one_step` of FedNCF).  The direction is known up to its sign.  At first :math:`\sigma(z_i) \approx 1 / (1 + \nu)`
    with :math:`\nu` negatives for each interaction, and an interaction is in a step once: interactions pull with
    :math:`\nu / (1 + \nu)`, a single negative with :math:`1 / (1 + \nu)`.  So of the two signs the interactions have
    the one whose least pull is larger.  Where the changes have more than one direction, they are of several users, and
    tell nothing.
    """
    for one in of_purpose(sums, Purpose.TRAIN)[:1]:
        rows = one.sums["items"]
        _, sizes, directions = np.linalg.svd(rows)
        # What rounding adds to a matrix of rank one: less than a step in each value.
        if sizes[1] >= STEP * np.sqrt(np.count_nonzero(rows)):
            return set()
        pulls = rows @ directions[0]
        positive = max((pulls, -pulls), key=lambda signed: signed[signed > 0].min())
        return keys(one, positive > 0)
    return set()


@pytest.mark.parametrize("thorough", [False, True], ids=["one-plan", "a-plan-for-each"])
async def test_a_host_that_is_told_of_other_open_items_than_the_rest_is_in_no_sum_of_training(
    under, thorough
):
    lied = under(OpenToOne, thorough=thorough)
    attacked = await attack(lied, liked)
    assert attacked.accuracy == NOTHING
    assert {one.purpose for one in lied.revealed()} == {"supports", "evaluate"}
    assert attacked.abandoned
    reason = "for this plan" if thorough else "the input 'open-items' that the server sent is not the one"
    assert all(reason in one for one in attacked.declined[VICTIM])


# --- 1c: another plan of the run for everybody else --------------------------------------------------------------


async def test_hosts_that_are_told_another_plan_of_the_run_than_the_operator_signed_leave_it(under):
    # The hosts are told of the run when they join it, and leave it: for good before it has gathered, or after.
    attacked = await refused(under(NoRate, ends_after_s=15.0))
    assert attacked.declined == {
        other: ["the run's plan is not signed by an operator whom this party accepts"] for other in OTHERS
    }


# --- 2: the same sum twice, once without the victim --------------------------------------------------------------


def missing(sums: Sequence[Revealed]) -> set[str]:
    """Return the items in which two sums differ that are the same but for one party."""
    for one, other in itertools.permutations(of_purpose(sums, Purpose.SUPPORTS), 2):
        gone = set(one.parties) - set(other.parties)
        if len(gone) == 1 and (one.pass_number, one.part) == (other.pass_number, other.part):
            return keys(one, one.sums["supports"] > other.sums["supports"])
    return set()


@pytest.mark.parametrize(
    ("secure_sum", "users_at"), [("masked", MANY), ("encrypted", USERS_AT)], ids=["masked", "encrypted"]
)
async def test_a_sum_that_was_formed_is_not_formed_again_without_the_victim(under, secure_sum, users_at):
    lied = under(AskedTwice, secure_sum, users_at)
    attacked = await attack(lied, missing)
    assert attacked.accuracy == NOTHING
    only_one_was_formed(lied, attacked, sum(users_at))


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
async def test_a_group_does_not_tell_its_items_again_when_the_server_changes_the_model(under, secure_sum):
    lied = under(OtherModels, secure_sum)
    only_one_was_formed(lied, await attack(lied, supported), sum(USERS_AT))


def only_one_was_formed(lied: Lied, attacked: Attacked, users: int) -> None:
    """Check that members, or key holders, revealed one sum over everybody, and refused every further one."""
    (formed,) = lied.revealed()
    assert (formed.purpose, formed.pass_number, formed.part) == (Purpose.SUPPORTS.value, 0, 0)
    assert formed.users == users
    assert attacked.phase == "failed"
    refusing = set(formed.holders) or set(formed.parties)
    reasons = {party: set(attacked.declined[party]) for party in refusing - {lied.victim}}
    assert all(
        "part 0 of pass 0 (supports) was revealed already" in reason
        for said in reasons.values()
        for reason in said
    ), reasons


# --- 4: an accomplice as a data owner ----------------------------------------------------------------------------


@pytest.fixture
def of_drift(small, tmp_path):
    """Return a function that makes a federation of DRIFT whose COS tells a lie; its victim is the last host."""

    def make(
        lie: type[Lie], secure_sum: str = "clear", *, owners: int = 2, hosts: int = 2, **drift: Any
    ) -> Lied:
        settings = small(
            secure_sum=secure_sum, drift=drift, federation={"owners": owners, "hosts": hosts, "min_users": 1}
        )
        feed = make_feed(settings, load(settings), 0)
        victim = f"client/host-{hosts - 1}"
        return Lied(settings, feed, tmp_path, lie, victim, hold=[victim])

    return make


@pytest.mark.parametrize("role", ["client", "data-owner"])
async def test_a_host_sends_nothing_to_an_accomplice_that_poses_as_a_data_owner(of_drift, role):
    lied = of_drift(PosingAsOwner, owners=3)
    posed_as, *others = sorted(lied.feed.partition.names)
    posing = f"data-owner/{others[0]}" if role == "data-owner" else "client/host-0"
    async with lied:
        await lied.start()
        for party in ("client/host-0", *lied.parties("data-owner")):
            await lied.change(party, "joined")
        async with lied.accomplice(posing) as accomplice:
            lied.release(lied.victim)
            report = await lied.finish()
    assert lied.ended_well()
    assert accomplice.asked == 0
    assert accomplice.opened == set()
    # The other owners have the victim's records, and the run goes on with them.
    assert report["phase"] == "done"
    sent = rows(lied.children[lied.victim].state / "client.db", "SELECT DISTINCT recipient FROM sent")
    assert {to for (to,) in sent if to.startswith("data-owner/")} == {
        f"data-owner/{other}" for other in others
    } - {posing}
    (reason,) = lied.declined()[lied.victim]
    assert reason.startswith(
        "the COS introduces as a data owner what is none: 'host-0.client.coterie.internal'"
        if role == "client"
        else f"the COS introduces data owner {posed_as!r} as one of {others[0]!r}, and the signed plan says"
    )
    refusals = [line for line in lied.log(lied.victim) if line["event"] == "sends nothing to a data owner"]
    assert [(line["owner"], line["reason"]) for line in refusals] == [(posed_as, reason)]


# --- 5: a floor of one user for data owners ----------------------------------------------------------------------


def left_alone(lied: Lied) -> bool:
    """Whether nothing reached a data owner, and none joined a window."""
    stores = [lied.children[party].state / "data_owner.db" for party in lied.parties("data-owner")]
    return not any(
        rows(store, f"SELECT * FROM {table}") for store in stores for table in ("visits", "windows")
    )


def objections(lied: Lied, owner: str) -> list[str]:
    """Return why an owner has left the run, by its log; empty while it has not."""
    if not lied.children[owner].log.exists():
        return []
    lines = [line for line in lied.log(owner) if line["event"] == "outside these owners' consent"]
    return [reason for line in lines for reason in line["reasons"]]


async def test_owners_that_are_told_a_floor_of_one_user_leave_and_release_nothing(of_drift):
    lied = of_drift(OneBehind, owners=3, hosts=3, form="shielded", k_min=3)
    async with lied:
        await lied.start()
        for owner in lied.parties("data-owner"):
            await lied.comes_true(lambda owner=owner: objections(lied, owner), f"{owner} has left")
            assert await lied.health(owner) == "NOT_SERVING"
            (reason,) = objections(lied, owner)
            assert reason == "the run's plan is not signed by an operator whom this party accepts"
        await lied.stop()
    assert left_alone(lied)


async def test_owners_leave_a_run_whose_signed_floor_is_below_their_own(of_drift):
    lied = of_drift(Lie, owners=3, hosts=3, form="shielded", k_min=3)
    refusing = f"data-owner/{lied.feed.partition.names[0]}"
    lied.hold.append(refusing)
    async with lied:
        await lied.start()
        lied.hold.remove(refusing)
        lied.children[refusing].start("consent.k_min=4")
        await lied.comes_true(lambda: objections(lied, refusing), "the owner has left")
        assert await lied.health(refusing) == "NOT_SERVING"
        assert objections(lied, refusing) == [
            "the floor of users behind a row that leaves an owner is 3; accepted is 4 or more"
        ]
        await lied.stop()
    assert left_alone(lied)


# --- 6: one holder of the key ------------------------------------------------------------------------------------


async def test_a_holder_that_plans_name_alone_decrypts_nothing(under):
    attacked = await refused(under(OneHolder, "encrypted"))
    assert ["1 of 3 key holders confirmed the list; it takes a majority"] in attacked.declined.values()


async def holder_restarts(lied: Lied, *, keeps_journal: bool) -> None:
    """Restart the holder that decrypts once it has decrypted a sum; its journal may be lost with that."""
    await lied.comes_true(lied.revealed, "the first list is decrypted")
    child = lied.children[lied.revealed()[0].holders[0]]
    child.kill()
    if not keeps_journal:
        (child.state / "journal.json").unlink()
    child.start()


def missing_from_the_second_list(sums: Sequence[Revealed]) -> set[str]:
    """Return the items in which two sums under one plan differ."""
    first = of_purpose(sums, Purpose.SUPPORTS)[:1]
    return missing([one for one in sums if first and one.round == first[0].round])


@pytest.mark.parametrize("keeps_journal", [True, False], ids=["with-its-journal", "without"])
async def test_holders_decrypt_no_second_list_of_one_plan_though_one_has_lost_its_journal(
    under, keeps_journal
):
    lied = under(SecondList, "encrypted")
    attacked = await attack(
        lied, missing_from_the_second_list, meanwhile=partial(holder_restarts, keeps_journal=keeps_journal)
    )
    assert attacked.accuracy == NOTHING
    second = "is asked to confirm another list of submitters than before"
    assert sum(second in reasons for reasons in attacked.declined.values()) == 3 - (not keeps_journal)


# --- what is refused ---------------------------------------------------------------------------------------------

REFUSED = {
    False: "the model that the server sent is not the one of the round's plan",
    True: "for this plan",
}
"""Why a host refuses a model of its own, by whether it was shown a plan with the hash of that model."""


@pytest.mark.parametrize("thorough", REFUSED, ids=["one-plan", "a-plan-for-each"])
async def test_a_host_that_is_told_another_model_than_others_is_in_no_sum(under, thorough):
    lied = under(OtherRows, thorough=thorough)
    attacked = await attack(lied, supported)
    assert attacked.accuracy == NOTHING
    assert attacked.phase == "failed"
    assert lied.revealed() == []
    assert all(REFUSED[thorough] in reason for reason in attacked.declined[lied.victim])
