"""Compare FedGNN's local step for all users of a host, in NumPy, with PyTorch's autograd on the same batches."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.rows import Ask, Row, in_turn, lower
from coterie.systems.fedgnn.attention import Graphs
from coterie.systems.fedgnn.local_step import Neighbours, local_step, stacked_graphs, steps
from coterie.systems.fedgnn.mathematics import initial, initial_factors
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.biases import moving, scaled
from coterie.systems.shared.factor_steps import UserData

__all__ = ["rows", "torch_steps"]

_USERS, _ITEMS = 943, 1682


def torch_steps(
    layer: NDArray[np.float64],
    graphs: Graphs,
    ratings: NDArray[np.float64],
    settings: FedGnnSettings,
    opened: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Take the steps of several users by autograd; parameters as for `coterie.systems.fedgnn.local_step.steps`.

    Returns
    -------
    tuple of ndarray
        Changes of the rows of items, copies of the layer, and users' own rows, as in `TakenSteps`.
    """
    import torch
    from torch.nn.functional import leaky_relu

    of_users, of_items = (torch.from_numpy(one) for one in moving(settings))
    rated, known = torch.from_numpy(graphs.rated), torch.from_numpy(graphs.known)
    others, wanted = torch.from_numpy(graphs.neighbours), torch.from_numpy(ratings)
    moves = (rated * torch.from_numpy(opened))[:, :, None] * of_items
    count = rated.sum(dim=1).clamp(min=1.0)[:, None]
    own = torch.from_numpy(graphs.users.copy()).requires_grad_()
    items = torch.from_numpy(graphs.items.copy()).requires_grad_()
    layers = torch.from_numpy(layer.copy()).repeat(len(ratings), 1, 1).requires_grad_()
    for _ in range(settings.local_epochs):
        p, q = own[:, 2:], items[:, :, 2:]
        weights, left, right = layers[:, :-2], layers[:, -2], layers[:, -1]
        nodes = torch.cat([p[:, None], q, others], dim=1)
        there = torch.cat([torch.ones(len(p), 1), rated, known], dim=1)
        logits = leaky_relu(
            ((p * left).sum(1)[:, None] + torch.einsum("nvk,nk->nv", nodes, right)), negative_slope=0.2
        )
        logits = logits.masked_fill(there == 0, -torch.inf)
        shares = torch.exp(logits - logits.max(dim=1, keepdim=True).values.detach())
        of_items_alone = shares[:, 1 : 1 + q.shape[1]]
        total = shares.sum(dim=1)[:, None] - of_items_alone
        gathered = torch.einsum("nv,nvk->nk", shares, nodes)[:, None] - of_items_alone[:, :, None] * q
        hidden = p[:, None] + torch.matmul(gathered / total[:, :, None], weights.transpose(1, 2))
        missed = rated * (wanted - own[:, 0, None] - items[:, :, 1] - (hidden * q).sum(dim=2))
        by_own, by_items, by_layers = torch.autograd.grad((missed * missed).sum(), [own, items, layers])
        with torch.no_grad():
            own -= settings.private_rate * of_users * (by_own / count + 2 * settings.ridge * own)
            items -= settings.rate * moves * (by_items + 2 * settings.ridge * items)
            layers -= settings.layer_rate * by_layers / count[:, :, None]
    change = (items.detach().numpy() - graphs.items) * graphs.rated[:, :, None]
    return change, layers.detach().numpy(), own.detach().numpy()


def _users(ask: Ask) -> tuple[list[UserData], int, str]:
    """Return users with ratings: of a MovieLens 100K folder, or synthetic ones of its sizes."""
    rng = np.random.default_rng(0)
    if ask.data is not None and (ask.data / "u.data").exists() and not ask.smallest:
        table = np.loadtxt(ask.data / "u.data", dtype=np.int64)
        of_each = [table[table[:, 0] == user] for user in np.unique(table[:, 0])]
        users = [UserData(own[:, 1] - 1, own[:, 2].astype(np.float32)) for own in of_each]
        return users, _ITEMS, "ML-100K"
    n = ask.size(_USERS, 6)
    sizes = np.clip(rng.lognormal(4.2, 1.0, n), 18, 735).astype(int)
    items = [rng.choice(_ITEMS, size, replace=False) for size in sizes]
    users = [UserData(own, rng.integers(1, 6, len(own)).astype(np.float32)) for own in items]
    return users, _ITEMS, "synthetic, sizes of ML-100K"


def rows(ask: Ask) -> Iterator[Row]:
    """Measure a pass of all users of one host, one thread each, in CPU seconds, and the memory of the step."""
    import torch

    torch.set_num_threads(1)
    users, n_items, origin = _users(ask)
    keys = np.arange(len(users))
    for factors, known in ask.size(((16, 0), (16, 32), (64, 32)), ((16, 2),)):
        settings = FedGnnSettings(factors=factors, neighbours=known)
        model, own = initial(settings, n_items, 0), initial_factors(settings, keys)
        around: Neighbours | None = None
        if known:
            rng = np.random.default_rng(1)
            embeddings = rng.normal(0, 0.3, (len(users), known, factors)).astype(np.float32)
            around = embeddings, np.full(len(users), known)

        def ours(
            settings: FedGnnSettings = settings,
            model: dict[str, NDArray[np.float32]] = model,
            own: NDArray[np.float32] = own,
            around: Neighbours | None = around,
        ) -> None:
            for _ in local_step(model, users, settings, keys, rows=own, seed=0, round_=0, neighbours=around):
                pass

        def batches(
            take: object,
            settings: FedGnnSettings = settings,
            model: dict[str, NDArray[np.float32]] = model,
            own: NDArray[np.float32] = own,
            around: Neighbours | None = around,
        ) -> None:
            items, layer = model["items"].astype(np.float64), model["layer"].astype(np.float64)
            for stack, graphs, places in stacked_graphs(items, users, own, around):
                ratings = np.zeros(places.shape)
                for row, user in enumerate(stack):
                    ratings[row, : len(users[user].items)] = scaled(settings, users[user].ratings)
                take(layer, graphs, ratings, settings, np.ones(places.shape, np.bool_))  # type: ignore[operator]

        spent, by_torch = in_turn(
            lambda batches=batches: batches(steps),  # type: ignore[misc]
            lambda batches=batches: batches(torch_steps),  # type: ignore[misc]
            rounds=ask.size(5, 1),
        )
        whole, _ = in_turn(ours, lambda: None, rounds=ask.size(5, 1))
        tracemalloc.start()
        ours()
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        yield lower(
            f"fedgnn.local_step.{factors}.{known}",
            spent * 1e3,
            by_torch * 1e3,
            "ms",
            f"{len(users)} users, {origin}, K {factors}, {known} neighbours; "
            f"with graphs and draws {whole * 1e3:.0f} ms; "
            f"at most {peak:.1f} MiB",
        )
