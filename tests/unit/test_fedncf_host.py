"""FedNCF's side of a host, `coterie.systems.fedncf.host`: what it hands to the local step."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.rounds.sides import User
from coterie.secure_sum.plan import SumPlan
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedncf import host
from coterie.systems.fedncf.local_step import local_step
from coterie.systems.fedncf.mathematics import initial, layout
from coterie.systems.registry import host_side

SETTINGS = RunSettings.model_validate(
    {
        "system": "fedncf",
        "federation": {"hosts": 1},
        "data": {"synthetic": {"users": 20, "items": 30, "interactions": 200}},
    }
)


def codes(opened: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """Return what the changes of items of all users sum up to, as centred codes (items, width)."""
    feed = make_feed(SETTINGS, load(SETTINGS), 0)
    data = feed.hosted(0)
    settings = SETTINGS.fedncf
    side = host_side("fedncf", settings.to_json(), data, key_hash(data.users, 0), 0, lambda made: made)
    model = initial(settings, len(data.items), 0)
    users = [User(index, index % 2) for index in range(len(data.users))]
    asked = cast(SumPlan, SimpleNamespace(purpose="train", round=1, pass_number=0))
    ((_, found),) = side.contributions(asked, model, opened, {0: users})
    shape = layout(settings, len(data.items))
    first = shape.segments[0]
    centred: NDArray[np.int64] = found[: first.size].astype(np.int64) - len(users) * 2 ** (first.bits - 1)
    return centred.reshape(first.shape)


def test_an_item_that_is_open_to_one_of_two_groups_counts_its_negatives_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = np.ones((2, 30), np.bool_)
    opened[1, :10] = False
    balanced = codes(opened)
    given: list[Any] = []

    def unbalanced(*arguments: Any, balance: Any, **more: Any) -> Any:
        given.append(balance)
        return local_step(*arguments, balance=None, **more)

    monkeypatch.setattr(host, "local_step", unbalanced)
    plain = codes(opened)
    assert [each.tolist() for each in given] == [[2.0] * 10 + [1.0] * 20] * 2
    assert (balanced[:10] != plain[:10]).any()
    np.testing.assert_array_equal(balanced[10:], plain[10:])


def test_without_groups_that_were_asked_nothing_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def nothing(*_: Any, allowed: Any, balance: Any, **__: Any) -> Any:
        given.append((allowed, balance))
        return iter(())

    monkeypatch.setattr(host, "local_step", nothing)
    with pytest.raises(ValueError, match="unpack"):
        codes(None)
    assert given == [(None, None)] * 2
