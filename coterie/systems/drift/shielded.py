r"""Mathematics of DRIFT's shielded form, in which the orchestrator sees no single user's request or gradient.

The user's row :math:`v_u` stays with the user, who takes it along to each owner that it visits.  An owner computes its
blocks' gradients with the mathematics of `coterie.systems.drift.mathematics`, moves :math:`v_u` from block to block,
and *holds* the items' gradients back until enough users have contributed to a row.  Now and then the orchestrator opens
a *window*: owners hand over the rows that may leave, as one vector over all items whose sum steps :math:`\Psi`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.systems.drift.blocks import Block, BlockBuilder, Stream
from coterie.systems.drift.mathematics import Rows, initial, learned, wanted
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.unseen import drawing

__all__ = ["HeldRows", "Released", "Visited", "initial_row", "run_shielded", "visit", "visit_all"]

_ORDER, _ROW = 3, 4
"""First elements of keys under which the order of visits and a user's own row are drawn; the published form has lower
ones (`coterie.systems.drift.mathematics`)."""


class Released(NamedTuple):
    """Rows of item gradients that an owner releases into one window.

    Parameters
    ----------
    items : ndarray of int32, shape (n,)
        Ascending.
    gradient : ndarray of float32, shape (n, d)
    contributors : tuple of frozenset of int
        Users behind each row; stays with the owner.
    """

    items: NDArray[np.int32]
    gradient: NDArray[np.float32]
    contributors: tuple[frozenset[int], ...]


@dataclass
class HeldRows:
    """Item gradients that an owner holds back, with the users who contributed to each row.

    Parameters
    ----------
    n_items, dim : int
        Numbers of items and of values in a row of the model; rows of items that are not the owner's stay zero.
    """

    n_items: int
    dim: int
    gradient: NDArray[np.float32] = field(init=False)
    contributors: dict[int, set[int]] = field(default_factory=dict)
    """Distinct users with a record of the item, by item; empty sets where an item was only drawn as unseen."""

    def __post_init__(self) -> None:
        self.gradient = np.zeros((self.n_items, self.dim), np.float32)

    def add(
        self,
        user: int,
        items: NDArray[np.integer],
        gradient: NDArray[np.float32],
        recorded: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add one user's gradient of some rows.

        Parameters
        ----------
        user : int
        items : ndarray of integers, shape (n,)
            None twice.
        gradient : ndarray of float32, shape (n, d)
        recorded : ndarray of bool, shape (n,), optional
            Items of which the user has a record; all of them unless given.  For the others, drawn as unseen, the
            user does not count as one behind the row: a single user's like would leave among four who know nothing.
        """
        counts = [True] * len(items) if recorded is None else recorded.tolist()
        behind = {item: {user} for item, counted in zip(items.tolist(), counts, strict=True) if counted}
        self.add_all(items, gradient, behind)

    def add_all(
        self, items: NDArray[np.integer], gradient: NDArray[np.float32], behind: Mapping[int, set[int]]
    ) -> None:
        """Add the summed gradient of several users.

        Parameters
        ----------
        items, gradient
            As for `add`, summed over the users.
        behind : mapping of int to set of int
            Users with a record of an item, by item; items without any are left out.
        """
        self.gradient[items] += gradient
        for item in items.tolist():
            self.contributors.setdefault(item, set()).update(behind.get(item, ()))

    def grow(self, n_items: int) -> None:
        """Extend the table to ``n_items`` rows; a smaller number changes nothing."""
        if n_items > self.n_items:
            wider = np.zeros((n_items, self.dim), np.float32)
            wider[: self.n_items] = self.gradient
            self.n_items, self.gradient = n_items, wider

    def ready(self, k_min: int) -> Released:
        """Return the rows to which at least ``k_min`` users contributed; they stay held."""
        ready = sorted(item for item, users in self.contributors.items() if len(users) >= k_min)
        items = np.array(ready, np.int32)
        return Released(
            items, self.gradient[items], tuple(frozenset(self.contributors[item]) for item in ready)
        )

    def drop(self, released: Released) -> None:
        """Stop holding rows, which are released."""
        self.gradient[released.items] = 0
        for item in released.items.tolist():
            del self.contributors[item]

    def release(self, k_min: int) -> Released:
        """Remove and return the rows to which at least ``k_min`` users contributed."""
        released = self.ready(k_min)
        self.drop(released)
        return released

    def put_back(self, released: Released) -> None:
        """Hold released rows again that did not leave the owner after all."""
        self.gradient[released.items] += released.gradient
        for item, users in zip(released.items.tolist(), released.contributors, strict=True):
            self.contributors.setdefault(item, set()).update(users)

    def __len__(self) -> int:
        """Return the number of rows held."""
        return len(self.contributors)


@dataclass(frozen=True)
class Visited:
    r"""Result of a user's visit to an owner: the step of its row, and item gradients.

    Parameters
    ----------
    step : ndarray of float32, shape (d,)
        To be added to the user's row, the paper's :math:`-\alpha \nabla v_u` over all blocks.
    loss : float
        Sum over the blocks.
    blocks : int
    items : ndarray of int32, shape (n,)
        Items in the blocks, ascending.
    gradient : ndarray of float32, shape (n, d)
        Gradient of their rows, summed over the blocks; the owner holds it back.
    recorded : ndarray of bool, shape (n,)
        Whether the user has a record of the item; the others were drawn as unseen.
    """

    step: NDArray[np.float32]
    loss: float
    blocks: int
    items: NDArray[np.int32]
    gradient: NDArray[np.float32]
    recorded: NDArray[np.bool_]


def visit(
    blocks: Sequence[Block], row: NDArray[np.float32], Psi: NDArray[np.float32], settings: DriftSettings
) -> Visited:
    """Learn from one user's blocks at an owner: the user's row moves from block to block, item rows stay.

    Parameters
    ----------
    blocks : sequence of Block
        All of one user, with their unseen items where the settings ask for them; there may be none.
    row : ndarray of float32, shape (d,)
        The user's row at the begin of the visit.
    Psi : ndarray of float32, shape (I, d)
        As the owner has it; only rows of items that the blocks name are read.
    settings : DriftSettings
    """
    moving, loss = row.astype(np.float32, copy=True), 0.0
    _, items = wanted(blocks)
    summed = np.zeros((len(items), len(row)), np.float32)
    for block in blocks:
        users, named = wanted([block])
        update = learned([block], Rows(users, named, moving[None, :], Psi[named]), settings)
        moving -= np.float32(settings.rate) * update.user_gradient[0]
        summed[np.searchsorted(items, named)] += update.item_gradient
        loss += update.loss
    own = {item for block in blocks for item in (*block.positives, *block.negatives)}
    recorded = np.array([item in own for item in items.tolist()], bool)
    return Visited(moving - row, loss, len(blocks), items, summed, recorded)


def visit_all(
    visits: Mapping[int, Sequence[Block]],
    Upsilon: NDArray[np.float32],
    Psi: NDArray[np.float32],
    held: HeldRows,
    settings: DriftSettings,
) -> tuple[float, int]:
    """Let several users visit one owner, as `visit` one by one but faster: the n-th block of all of them at once.

    Parameters
    ----------
    visits : mapping of int to sequence of Block
        Blocks by user, at least one each.
    Upsilon : ndarray of float32, shape (U, d)
        Changed in place.
    Psi : ndarray of float32, shape (I, d)
    held : HeldRows
        Of the owner; the items' gradients are added.
    settings : DriftSettings

    Returns
    -------
    loss : float
    blocks : int
    """
    loss, count = 0.0, 0
    for together in zip_longest(*visits.values()):
        blocks = [block for block in together if block is not None]
        users, items = wanted(blocks)
        # Different users' blocks share rows of items only, and these stay until the window.
        update = learned(blocks, Rows(users, items, Upsilon[users], Psi[items]), settings)
        Upsilon[users] -= np.float32(settings.rate) * update.user_gradient
        behind: dict[int, set[int]] = {}
        for block in blocks:
            for item in (*block.positives, *block.negatives):
                behind.setdefault(item, set()).add(block.user)
        held.add_all(items, update.item_gradient, behind)
        loss, count = loss + update.loss, count + update.blocks
    return loss, count


def initial_row(key: int, settings: DriftSettings) -> NDArray[np.float32]:
    """Draw a user's row before its first visit, from the user's own number.

    Parameters
    ----------
    key : int
        The user's own number, which nobody else knows.
    settings : DriftSettings

    Returns
    -------
    ndarray of float32, shape (d,)
        Distributed as `coterie.systems.drift.mathematics.initial_user_rows`.
    """
    rng = np.random.default_rng(np.random.SeedSequence(key, spawn_key=(_ROW,)))
    row = rng.standard_normal(settings.dim, dtype=np.float32) * np.float32(settings.init_scale)
    if settings.item_bias:
        row[-1] = 1
    return row


def run_shielded(
    streams: Sequence[Stream],
    n_users: int,
    n_items: int,
    settings: DriftSettings,
    *,
    epochs: int,
    seed: int,
    k_min: int = 5,
    window: int = 64,
    holdings: Sequence[NDArray[np.integer]] | None = None,
    on_epoch: Callable[[int, NDArray[np.float32], NDArray[np.float32], float], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], int]:
    """Train DRIFT's shielded form over several owners in one process.

    Between two windows an owner takes the visits of all its users together; the owners take turns.

    Parameters
    ----------
    streams : sequence of Stream
        One per owner.
    n_users, n_items : int
    settings : DriftSettings
        ``theta`` is not used.
    epochs, seed : int
    k_min : int
        Fewest distinct users behind a row that leaves an owner.
    window : int
        Visits between two windows.
    holdings : sequence of ndarray of integers, optional
        Items of each owner, from which ``unseen`` "own" draws; unless given, those in its stream.
    on_epoch : callable, optional
        As in `coterie.systems.drift.sequential.run_in_process`.

    Returns
    -------
    Upsilon : ndarray of float32, shape (n_users, d)
    Psi : ndarray of float32, shape (n_items, d)
    dropped : int
        Rows that were still held at the end.
    """
    Upsilon, Psi = initial(n_users, n_items, settings, seed)
    blocks: list[dict[int, list[Block]]] = []
    draw = drawing(streams, n_items, settings, seed, holdings)
    for stream in streams:
        builder = BlockBuilder(keep_all=settings.pairs_unseen)
        interactions = zip(stream.user.tolist(), stream.item.tolist(), stream.positive.tolist(), strict=True)
        made = [block for one in interactions if (block := builder.add(*one)) is not None] + builder.flush()
        by_user: dict[int, list[Block]] = {}
        for block in made:
            by_user.setdefault(block.user, []).append(block)
        blocks.append(by_user)
    held = [HeldRows(n_items, settings.dim) for _ in streams]
    visits = [(user, owner) for owner, by_user in enumerate(blocks) for user in by_user]
    for epoch in range(1, epochs + 1):
        loss, count = 0.0, 0
        order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_ORDER, epoch))).permutation(
            len(visits)
        )
        for first in range(0, len(order), window):
            at_owner: dict[int, dict[int, list[Block]]] = {}
            for place in order[first : first + window].tolist():
                user, owner = visits[place]
                drawn = [draw[owner](block, epoch) for block in blocks[owner][user]]
                at_owner.setdefault(owner, {})[user] = drawn
            for owner, together in at_owner.items():
                of_visits, trained = visit_all(together, Upsilon, Psi, held[owner], settings)
                loss, count = loss + of_visits, count + trained
            _step(Psi, held, k_min, settings.rate)
        if on_epoch is not None:
            on_epoch(epoch, Upsilon, Psi, loss / count if count else float("nan"))
    return Upsilon, Psi, sum(map(len, held))


def _step(Psi: NDArray[np.float32], held: Sequence[HeldRows], k_min: int, rate: float) -> None:
    for one in held:
        released = one.release(k_min)
        Psi[released.items] -= np.float32(rate) * released.gradient
