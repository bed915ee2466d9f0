"""What a COS that lies learns of one user, in federations whose other parties are all real."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from coterie.rounds.training import Purpose
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedncf.purposes import layout_of
from coterie.systems.fedncf.settings import FedNcfSettings

from .lying.federation import Lied
from .lying.lies import AskedTwice, Lie, NoRate, OpenToOne, OtherItems
from .lying.revealed import Revealed

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


ALL_OF_THEM = Accuracy(1.0, 1.0)


@dataclass(frozen=True)
class Attacked:
    """What came of an attack.

    Parameters
    ----------
    accuracy : Accuracy
    phase : str
        How the run ended.
    abandoned : list of str
        Why rounds were abandoned.
    declined : dict of str to list of str
        Reasons on receipts why hosts sat out, by host.
    """

    accuracy: Accuracy
    phase: str
    abandoned: list[str]
    declined: dict[str, list[str]]

    def noticed(self) -> bool:
        """Whether anybody noticed: a host that sat out, a round that was abandoned, a run that failed."""
        return bool(self.declined or self.abandoned) or self.phase != "done"


@pytest.fixture
def under(small, tmp_path):
    """Return a function that makes a federation whose COS tells a lie."""

    def make(
        lie: type[Lie], secure_sum: str = "masked", users_at: Sequence[int] = USERS_AT, **options: Any
    ) -> Lied:
        users = sum(users_at)
        settings = small(
            system="fedncf",
            secure_sum=secure_sum,
            split={"kind": "leave-last-out"},
            data={"synthetic": {"users": users, **DATA}},
            rounds={"cohort": users, "group": users, "passes": 1, "evaluate_every": 1},
            federation={"hosts": len(users_at)},
            encryption=KEY,
        )
        feed = make_feed(settings, load(settings), 0)
        feed = dataclasses.replace(feed, host=np.repeat(np.arange(len(users_at)), users_at))
        return Lied(settings, feed, tmp_path, lie, f"client/host-{len(users_at) - 1}", **options)

    return make


async def attack(
    lied: Lied,
    purpose: str,
    found_in: Callable[..., set[str]],
    sums: int = 1,
    truth: Callable[[Lied], set[str]] = Lied.training_items,
) -> Attacked:
    """Run a federation to its end, and compare what sums tell of the victim with its training items.

    Parameters
    ----------
    lied : Lied
        Not started.
    purpose : str
        Purpose of the sums that tell of the victim.
    found_in : callable
        Given the first sums of this purpose, returns the keys of the items that the victim has.
    sums : int
        How many sums this takes; where there are fewer, the attack finds nothing.
    truth : callable
        Given the federation, returns the keys of the items that the attack is to find.
    """
    async with lied:
        await lied.start()
        report = await lied.finish()
    assert lied.ended_well()
    seen = [one for one in lied.revealed() if one.purpose == purpose][:sums]
    found = found_in(*seen) if len(seen) == sums else set()
    wanted = truth(lied)
    right = len(found & wanted)
    accuracy = Accuracy(right / len(wanted), right / max(len(found), 1))
    return Attacked(accuracy, report["phase"], lied.abandoned(), lied.declined())


def keys(one: Revealed, chosen: np.ndarray) -> set[str]:
    """Return the keys of chosen items; given is a truth value for each."""
    return {key for key, yes in zip(one.items, chosen.tolist(), strict=True) if yes}


# --- 1a: another catalogue for everybody else --------------------------------------------------------------------


def all_supported(one: Revealed) -> set[str]:
    """Return the items of a sum in which all but the victim have none."""
    # By the plan it is the sum of everybody.
    assert one.users == sum(USERS_AT)
    assert len(one.parties) == len(USERS_AT)
    return keys(one, one.sums["supports"] > 0)


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
async def test_hosts_that_know_other_items_leave_the_victim_alone_in_the_sum(under, secure_sum):
    attacked = await attack(under(OtherItems, secure_sum), "supports", all_supported)
    assert attacked.accuracy == ALL_OF_THEM
    assert not attacked.noticed()


async def test_the_same_sum_of_a_server_that_tells_the_truth_is_of_everybody(under):
    attacked = await attack(under(Lie), "supports", all_supported)
    assert attacked.accuracy.recall == 1
    assert attacked.accuracy.precision < 0.2
    assert not attacked.noticed()


# --- 1b: items that are open to one host only --------------------------------------------------------------------


def liked(one: Revealed) -> set[str]:
    r"""Return the items with which a user interacted, from the changes of rows that it alone made in its first step.

    In GMF the change of item :math:`i` is :math:`c (y_i - \sigma(z_i)) k_i (h \odot p)`: one direction for all items,
    positive for an interaction (:math:`y_i = 1`), negative for :math:`k_i` drawn negatives (`gradients` and
    `_one_step` of FedNCF).  The direction is known up to its sign.  At first :math:`\sigma(z_i) \approx 1 / (1 + \nu)`
    with :math:`\nu` negatives for each interaction, and an interaction is in a step once: interactions pull with
    :math:`\nu / (1 + \nu)`, a single negative with :math:`1 / (1 + \nu)`.  So of the two signs the interactions have
    the one whose least pull is larger.
    """
    rows = one.sums["items"]
    _, sizes, directions = np.linalg.svd(rows)
    # What rounding adds to a matrix of rank one: less than a step in each value.
    assert sizes[1] < STEP * np.sqrt(np.count_nonzero(rows)) < sizes[0] / 10
    pull = rows @ directions[0]
    signs = [pull * sign for sign in (1, -1)]
    positive = max(signs, key=lambda pulls: pulls[pulls > 0].min())
    return keys(one, positive > 0)


async def test_items_that_are_open_to_the_victim_only_leave_its_rows_alone_in_the_sum(under):
    attacked = await attack(under(OpenToOne), "train", liked)
    assert attacked.accuracy == ALL_OF_THEM
    assert not attacked.noticed()


# --- 1c: another plan of the run for everybody else --------------------------------------------------------------


def open_training_items(lied: Lied) -> set[str]:
    """Return the victim's training items that are open for training: nobody sends the rows of others."""
    return lied.training_items() & lied.open_items()


async def test_hosts_that_train_at_no_rate_leave_the_victims_rows_alone_in_the_sum(under):
    attacked = await attack(under(NoRate), "train", liked, truth=open_training_items)
    assert attacked.accuracy == ALL_OF_THEM
    assert not attacked.noticed()


# --- 2: the same sum twice, once without the victim --------------------------------------------------------------


def missing(everybody: Revealed, others: Revealed) -> set[str]:
    """Return the items that are in a sum over everybody, and not in the sum over everybody but the victim."""
    assert (everybody.pass_number, everybody.part) == (others.pass_number, others.part)
    assert (everybody.users, others.users) == (sum(USERS_AT), sum(USERS_AT) - 1)
    return keys(everybody, everybody.sums["supports"] - others.sums["supports"] > 0)


@pytest.mark.parametrize(
    ("secure_sum", "users_at"), [("masked", MANY), ("encrypted", USERS_AT)], ids=["masked", "encrypted"]
)
async def test_a_sum_that_is_formed_again_without_the_victim_differs_by_its_items(
    under, secure_sum, users_at
):
    attacked = await attack(under(AskedTwice, secure_sum, users_at), "supports", missing, sums=2)
    assert attacked.accuracy == ALL_OF_THEM
    assert not attacked.noticed()
