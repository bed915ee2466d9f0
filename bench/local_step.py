"""Compare FedNCF's local step for a cohort of users with a per-user PyTorch loop that has the same result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bench.rows import Ask, Row, in_turn, lower
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedncf.local_step import contribute, local_step
from coterie.systems.fedncf.mathematics import initial, initial_private, layout
from coterie.systems.fedncf.networks import Architecture
from coterie.systems.fedncf.settings import FedNcfSettings, published, tuned

_COHORT = 100


def torch_loss(
    architecture: Architecture,
    embedding: Any,
    rows: Any,
    network: Any,
    label: Any,
) -> Any:
    """Return the mean binary cross-entropy of instances as an autograd graph.

    Parameters
    ----------
    architecture : Architecture
    embedding : torch.Tensor, shape (width,)
    rows : torch.Tensor, shape (n, width)
    network : torch.Tensor, shape (network_size,)
    label : torch.Tensor, shape (n,)
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, linear, relu

    G = architecture.gmf_width
    parts, start = [], 0
    if G:
        parts.append(embedding[:G] * rows[:, :G])
    if architecture.matrices:
        hidden = torch.cat([embedding[G:].expand(len(rows), -1), rows[:, G:]], 1)
        for m, k in architecture.matrices:
            layer = network[start : start + m * k].view(m, k)
            hidden = relu(linear(hidden, layer[:, :-1], layer[:, -1]))
            start += m * k
        parts.append(hidden)
    logits = torch.cat(parts, 1) @ network[start:-1] + network[-1]
    return binary_cross_entropy_with_logits(logits, label)


def torch_user(
    settings: FedNcfSettings,
    model: Mapping[str, NDArray[np.float32]],
    private: Mapping[str, NDArray[np.generic]],
    history: NDArray[np.integer],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Train one user with autograd and PyTorch's optimisers, with the same random draws as `local_step`.

    Parameters
    ----------
    settings : FedNcfSettings
    model : mapping
        Float32 arrays ``items`` and ``network``.
    private : mapping
        The user's ``embedding``, ``first``, ``second``, ``steps``.
    history : ndarray of int
    rng : Generator
        Generator of the user in this round.

    Returns
    -------
    dict
        ``items``, ``network``, ``embedding``, ``first``, ``second`` after the local step; ``loss``.
    """
    import torch

    n_items = len(model["items"])
    positives = np.sort(history)
    others = np.setdiff1d(np.arange(n_items), positives)
    epochs = settings.local_epochs
    size = len(positives) * (1 + settings.negatives)
    batch = settings.batch_size or size
    negatives = others[rng.integers(0, len(others), (epochs, settings.negatives * len(positives)))]
    places = np.broadcast_to(np.arange(size), (epochs, size))
    if batch < size:
        places = rng.permuted(places, axis=1)
    label = torch.from_numpy((np.arange(size) < len(positives)).astype(np.float32))

    items = torch.tensor(model["items"], requires_grad=True)
    network = torch.tensor(model["network"], requires_grad=True)
    embedding = torch.tensor(np.asarray(private["embedding"]), requires_grad=True)
    start = [items.detach().clone(), network.detach().clone()]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    local = kinds[settings.local_optimiser]([items, network], lr=settings.local_rate)
    own = kinds[settings.private_optimiser]([embedding], lr=settings.private_rate)
    if settings.private_optimiser == "adam":
        own.state[embedding] = {
            "step": torch.tensor(float(private["steps"])),
            "exp_avg": torch.tensor(np.asarray(private["first"])),
            "exp_avg_sq": torch.tensor(np.asarray(private["second"])),
        }
    losses = []
    for epoch in range(epochs):
        each = torch.from_numpy(np.concatenate([positives, negatives[epoch]]))
        order = np.argsort(places[epoch])
        for first in range(0, size, batch):
            chosen = torch.from_numpy(order[first : first + batch])
            local.zero_grad()
            own.zero_grad()
            loss = torch_loss(settings.architecture, embedding, items[each[chosen]], network, label[chosen])
            losses.append(float(loss.detach()))
            loss.backward()
            if settings.local_optimiser == "sgd":
                items.grad = cast("torch.Tensor", items.grad) * len(chosen)
            if settings.proximal:
                for value, was in zip((items, network), start, strict=True):
                    value.grad += settings.proximal * (value.detach() - was)  # type: ignore[operator]
            local.step()
            own.step()
    moments = own.state[embedding] if settings.private_optimiser == "adam" else {}
    return {
        "items": items.detach().numpy(),
        "network": network.detach().numpy(),
        "embedding": embedding.detach().numpy(),
        "first": moments["exp_avg"].numpy() if moments else None,
        "second": moments["exp_avg_sq"].numpy() if moments else None,
        "loss": float(np.mean(losses)),
    }


def _cohort(ask: Ask) -> tuple[list[NDArray[np.int64]], int, str]:
    """Return a cohort's histories, number of items and origin: from a MovieLens 100K folder, or synthetic."""
    rng = np.random.default_rng(0)
    if ask.smallest:
        return [rng.choice(40, 18, replace=False) for _ in range(3)], 40, "synthetic"
    data = ask.data
    if data is not None and (data / "u.data").exists():
        ratings = np.loadtxt(data / "u.data", dtype=np.int64)
        users = rng.choice(np.unique(ratings[:, 0]), _COHORT, replace=False)
        return [ratings[ratings[:, 0] == user, 1] - 1 for user in users], 1682, "ML-100K"
    sizes = np.clip(rng.lognormal(4.2, 1.0, _COHORT), 18, 735).astype(int)
    return [rng.choice(1682, size, replace=False) for size in sizes], 1682, "synthetic, sizes of ML-100K"


def rows(ask: Ask) -> Iterator[Row]:
    """Measure the local step of 100 users, one thread each, in CPU seconds."""
    import torch

    torch.set_num_threads(1)
    again = ask.size(5, 1)
    histories, n_items, origin = _cohort(ask)
    keys = list(range(len(histories)))
    for model in ("neumf", "gmf", "mlp"):
        base = tuned(model)
        batches = base.model_copy(update={"batch_size": 64, "local_rate": 0.01})
        ways = {"one step": base, "batches of 64": batches}
        if model == "neumf":
            ways["as the paper prints it"] = published(model)
        for name, settings in ways.items():
            shared, private = initial(settings, n_items, 0), initial_private(settings, keys)

            def ours(
                settings: FedNcfSettings = settings, shared: Any = shared, private: Any = private
            ) -> None:
                for _ in local_step(shared, private, histories, settings, keys, seed=0, round_=0):
                    pass

            def rounded(
                settings: FedNcfSettings = settings, shared: Any = shared, private: Any = private
            ) -> None:
                contribution = Contribution(layout(settings, n_items))
                for update in local_step(shared, private, histories, settings, keys, seed=0, round_=0):
                    contribute(update, contribution, settings)
                    contribution.count()

            def theirs(
                settings: FedNcfSettings = settings, shared: Any = shared, private: Any = private
            ) -> None:
                for slot, history in enumerate(histories):
                    one = {key: value[slot] for key, value in private.arrays().items()}
                    torch_user(settings, shared, one, history, np.random.default_rng(slot))

            spent, by_loop = in_turn(ours, theirs, rounds=again)
            with_sum, _ = in_turn(rounded, lambda: None, rounds=again)
            yield lower(
                f"fedncf.local_step.{model}.{name}",
                spent * 1e3,
                by_loop * 1e3,
                "ms",
                f"{len(keys)} users, {origin}; with the rounded contribution {with_sum * 1e3:.0f} ms; target 30x",
            )
