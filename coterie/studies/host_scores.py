"""Scores of all items that hosts compute for their users, as one table over the users of a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import HostSide, scorer_of
from coterie.studies.run_data import Feed

__all__ = ["host_scores"]


def host_scores(
    feed: Feed, hosts: int, sides: Sequence[HostSide], model: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the scores that users' hosts compute for them, float32 (U, I); 0 for users without interactions.

    Parameters
    ----------
    feed : Feed
    hosts : int
        Hosts over which its users are spread.
    sides : sequence of HostSide
        Sides of the hosts that have users, in their order.
    model : mapping
    """
    data = feed.dataset
    table = np.zeros((len(data.users), len(data.items)), np.float32)
    remaining = iter(sides)
    for number in range(hosts):
        users = np.unique(data.user[feed.host[data.user] == number])
        if len(users):
            score = scorer_of(next(remaining), model, len(users))
            for index, user in enumerate(users.tolist()):
                table[user] = score(index)
    return table
