r"""Models of neural collaborative filtering: scores, loss and gradients of GMF, MLP and NeuMF.

The models are those of He et al., *Neural Collaborative Filtering* (2017), in the sizes of Perifanis and Efraimidis,
*Federated Neural Collaborative Filtering* (2022).  For a user's embedding :math:`p`, an item's :math:`q` and the
logistic function :math:`\sigma`, the chance of an interaction is :math:`\sigma(z)`,

- GMF: :math:`z = h^T (p \odot q) + b`;
- MLP: :math:`z = w^T a_L + b` with :math:`a_0 = [p, q]`, :math:`a_l = \max(0, W_l a_{l-1} + b_l)`;
- NeuMF: :math:`z = h^T (p^G \odot q^G) + w^T a_L + b`, with separate embeddings for the two parts.

An embedding holds the part of GMF first, then that of the MLP.  All weights and biases lie one after the other in one
vector, the *network*: each layer as a matrix of shape (outputs, inputs + 1) whose last column is the bias, the first
layer's inputs being the user's part and then the item's; at the end :math:`h`, :math:`w`, :math:`b`.

Many users are computed at once, each with its own weights and copies of rows, as stacks of matrix products.  Instances
run along the *last* axis.  A user's product has the same shape whichever users share its stack, so its result has the
same bits.

Where the package coterie-native is installed, the gradients of users with one embedding each are computed by a compiled
kernel, if it agrees with the reference here.  It sums in another order, so values differ in the last bits, as they do
between processors.  Which of the two is used follows from the package and the processor alone, never from how long
either takes: processes of one machine have equal bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie import kernels
from coterie.errors import ConfigError

__all__ = [
    "MODELS",
    "Architecture",
    "Gradients",
    "ModelName",
    "borne",
    "compare_kernel",
    "gradients",
    "initial_items",
    "initial_network",
    "log_odds",
    "scores",
]

ModelName = Literal["gmf", "mlp", "neumf"]

MODELS: tuple[ModelName, ...] = get_args(ModelName)

_BLOCK = 1 << 15
"""Most candidates that are scored at once: their hidden layers fit into a core's cache."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Architecture:
    """Name and sizes of a model.

    Parameters
    ----------
    model : {"gmf", "mlp", "neumf"}
    dim : int
        Width of the embeddings of GMF, the paper's D.
    mlp_embedding : int
        Width of the embeddings of the MLP.
    layers : tuple of int
        Outputs of the MLP's hidden layers.

    Raises
    ------
    ConfigError
        An unknown model or a size below 1.
    """

    model: str = "neumf"
    dim: int = 12
    mlp_embedding: int = 12
    layers: tuple[int, ...] = (48, 24, 12, 6)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model is {self.model!r}; expected one of {', '.join(MODELS)}")
        if min(self.dim, self.mlp_embedding, *self.layers) < 1 or not self.layers:
            raise ConfigError(
                f"dim {self.dim}, mlp_embedding {self.mlp_embedding}, layers {self.layers}; "
                "expected at least one layer and sizes of at least 1"
            )

    @property
    def gmf_width(self) -> int:
        """Number of coordinates of an embedding that belong to GMF."""
        return 0 if self.model == "mlp" else self.dim

    @property
    def mlp_width(self) -> int:
        """Number of coordinates of an embedding that belong to the MLP."""
        return 0 if self.model == "gmf" else self.mlp_embedding

    @property
    def width(self) -> int:
        """Number of coordinates of an embedding."""
        return self.gmf_width + self.mlp_width

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes (outputs, inputs + 1) of the hidden layers."""
        if self.model == "gmf":
            return ()
        inputs = (2 * self.mlp_embedding, *self.layers)
        return tuple((m, k + 1) for k, m in itertools.pairwise(inputs))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths of an embedding's parts, GMF's and the MLP's, and outputs of the hidden layers."""
        return self.gmf_width, self.mlp_width, *(m for m, _ in self.matrices)

    @property
    def output_width(self) -> int:
        """Number of weights of the output layer, its bias included."""
        return self.gmf_width + (self.layers[-1] if self.matrices else 0) + 1

    @property
    def network_size(self) -> int:
        """Length of the network's vector."""
        return sum(math.prod(shape) for shape in self.matrices) + self.output_width

    def views(self, network: Floats) -> tuple[list[Floats], Floats]:
        """Return the layers as views into the network's vector.

        Parameters
        ----------
        network : ndarray of float32, shape (..., network_size)

        Returns
        -------
        hidden : list of ndarray, each of shape (..., outputs, inputs + 1)
        output : ndarray, shape (..., output_width)
        """
        hidden, start = [], 0
        for shape in self.matrices:
            stop = start + math.prod(shape)
            hidden.append(network[..., start:stop].reshape(*network.shape[:-1], *shape))
            start = stop
        return hidden, network[..., start:]


def _xavier(rng: np.random.Generator, shape: tuple[int, ...], fans: int) -> Floats:
    """Draw uniform weights of variance 2 / (inputs + outputs), after Glorot and Bengio (2010)."""
    bound = math.sqrt(6.0 / fans)
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def initial_items(architecture: Architecture, n_items: int, rng: np.random.Generator) -> Floats:
    """Draw initial item embeddings, float32 (n_items, width), each part after Glorot (Xavier)."""
    parts = [
        _xavier(rng, (n_items, width), n_items + width)
        for width in (architecture.gmf_width, architecture.mlp_width)
        if width
    ]
    return np.concatenate(parts, axis=1)


def log_odds(negatives: int) -> float:
    """Return the log-odds of an interaction among the instances, which are 1 to ``negatives``."""
    return -math.log(negatives)


def initial_network(architecture: Architecture, rng: np.random.Generator, bias: float = 0.0) -> Floats:
    """Draw the initial network, float32 (network_size,): weights after Glorot, all biases 0 but the output's.

    Parameters
    ----------
    architecture : Architecture
    rng : Generator
    bias : float
        Bias of the output.  From `log_odds` the first steps need not push every score down, which in a small network
        would turn hidden units off for good and leave many items with the same score; Lin et al., *Focal Loss for
        Dense Object Detection* (2017), section 4.1.
    """
    network = np.zeros(architecture.network_size, np.float32)
    hidden, output = architecture.views(network)
    for matrix in hidden:
        m, k = matrix.shape
        matrix[:, :-1] = _xavier(rng, (m, k - 1), m + k - 1)
    output[:-1] = _xavier(rng, (len(output) - 1,), len(output))
    output[-1] = bias
    return network


@dataclass(frozen=True, eq=False)
class Gradients:
    """Weighted loss of each user, and its derivatives.

    Parameters
    ----------
    loss : ndarray of float32, shape (users,)
    private : ndarray of float32, shape (users, width, 1) or (users, width, instances)
        Derivative by the private embeddings, of their shape.
    rows : ndarray of float32, shape (users, width, instances)
    network : ndarray of float32, shape (users, network_size)
    """

    loss: Floats
    private: Floats
    rows: Floats
    network: Floats


def gradients(
    architecture: Architecture, private: Floats, rows: Floats, network: Floats, label: Floats, weight: Floats
) -> Gradients:
    r"""Return the loss of each user and its derivatives.

    The loss is :math:`\sum_r \omega_r (\log(1 + e^{z_r}) - y_r z_r)`, binary cross-entropy of :math:`\sigma(z)`.  It
    is a mean if the weights add up to 1.  An instance of weight 0 is padding and has no influence.

    Parameters
    ----------
    architecture : Architecture
    private : ndarray of float32, shape (users, width, 1) or (users, width, instances)
        One embedding for all of a user's instances, or one for each instance.
    rows : ndarray of float32, shape (users, width + 1, instances)
        Item embeddings of the instances; the last coordinate is 1, so that the products add the bias.
    network : ndarray of float32, shape (network_size,) or (users, network_size)
        One network for all users, or one for each user.
    label, weight : ndarray of float32, shape (users, instances)

    Returns
    -------
    Gradients
    """
    if private.shape[2] == 1 and borne(architecture) and (compiled := _compiled()) is not None:
        return compiled(architecture, private, rows, network, label, weight)
    return _by_reference(architecture, private, rows, network, label, weight)


def _by_reference(
    architecture: Architecture, private: Floats, rows: Floats, network: Floats, label: Floats, weight: Floats
) -> Gradients:
    users, _, n = rows.shape
    G = architecture.gmf_width
    hidden, output = architecture.views(network)
    d_network = np.empty((users, architecture.network_size), np.float32)
    d_hidden, d_output = architecture.views(d_network)
    d_private = np.empty_like(private)
    d_rows = np.empty((users, architecture.width, n), np.float32)
    each = private.shape[2] != 1

    z = np.zeros((users, 1, n), np.float32)
    if G:
        v = private[:, :G] * output[..., :G, None]
        if each:
            np.sum(v * rows[:, :G], axis=1, keepdims=True, out=z)
        else:
            np.matmul(v.transpose(0, 2, 1), rows[:, :G], out=z)
    activations = _hidden(architecture, private, rows[:, G:], hidden)
    if hidden:
        z += np.matmul(output[..., None, G:], activations[-1])
    else:
        z += output[..., None, -1:]

    z = z[:, 0]
    y = label
    chance = np.exp(-np.abs(z))  # of the large side; never overflows
    loss = (weight * (np.log1p(chance) + np.maximum(z, 0) - y * z)).sum(axis=1)
    g = np.where(z >= 0, 1 / (1 + chance), chance / (1 + chance))
    g -= y
    g *= weight
    g = g[:, None]

    if G:
        rows_g, h = rows[:, :G], output[..., :G, None]
        np.multiply(v, g, out=d_rows[:, :G])
        if each:
            pull = rows_g * g
            np.sum(pull * private[:, :G], axis=2, out=d_output[:, :G])
            np.multiply(pull, h, out=d_private[:, :G])
        else:
            pull = np.matmul(rows_g, g.transpose(0, 2, 1))
            np.multiply(pull[..., 0], private[:, :G, 0], out=d_output[:, :G])
            np.multiply(pull, h, out=d_private[:, :G])
    if not hidden:
        np.sum(g, axis=2, out=d_output[:, -1:])
        return Gradients(loss, d_private, d_rows, d_network)

    np.matmul(activations[-1], g.transpose(0, 2, 1), out=d_output[:, G:, None])
    back = output[..., G:-1, None] * g
    for layer in range(len(hidden) - 1, 0, -1):
        inputs = activations[layer]
        back *= _inputs(activations[layer + 1]) > 0
        np.matmul(back, inputs.transpose(0, 2, 1), out=d_hidden[layer])
        back = np.matmul(hidden[layer][..., :-1].swapaxes(-1, -2), back)
    back *= _inputs(activations[1]) > 0
    M = architecture.mlp_width
    first, d_first = hidden[0], d_hidden[0]
    np.matmul(back, activations[0].transpose(0, 2, 1), out=d_first[..., M:])
    np.matmul(first[..., M:-1].swapaxes(-1, -2), back, out=d_rows[:, G:])
    # The bias's derivative is the sum over instances, as is the derivative of an embedding that all of them share.
    reaching = back if each else d_first[..., -1:]
    np.matmul(reaching, private[:, G:].transpose(0, 2, 1), out=d_first[..., :M])
    np.matmul(first[..., :M].swapaxes(-1, -2), reaching, out=d_private[:, G:])
    return Gradients(loss, d_private, d_rows, d_network)


_MOST_LAYERS = 16
_MOST_UNITS = 1 << 16

_Gradients = Callable[[Architecture, Floats, Floats, Floats, Floats, Floats], Gradients]


def _by_kernel(
    native: Any,
    way: str,
    architecture: Architecture,
    private: Floats,
    rows: Floats,
    network: Floats,
    label: Floats,
    weight: Floats,
) -> Gradients:
    arrays = map(np.ascontiguousarray, (private[..., 0], rows, network, label, weight))
    loss, d_private, d_rows, d_network = native.ncf_gradients(architecture.sizes, *arrays, way)
    return Gradients(loss, d_private[..., None], d_rows, d_network)


def borne(architecture: Architecture) -> bool:
    """Return whether the compiled kernels bear a network of these sizes; the reference bears any."""
    return len(architecture.matrices) <= _MOST_LAYERS and max(architecture.sizes) <= _MOST_UNITS


@cache
def _compiled() -> _Gradients | None:
    """Return the compiled kernel if it agrees with the reference here; None otherwise.

    It is not timed: where both were about as fast, processes of one machine would differ in the last bits.  Each way
    was faster than the reference on processors that have no better one (docs/benchmarks.md, Compiled kernels).
    """
    native = kernels.agreed("the compiled kernel of neural collaborative filtering", _agrees)
    if native is None:
        return None
    return partial(_by_kernel, native, native.ncf_ways()[0])


def compare_kernel() -> None:
    """Compare the compiled kernel with the reference, as before its first use; see `coterie.kernels.left_out`."""
    _compiled()


def _agrees(native: Any) -> bool:
    """Return whether each way of the compiled kernel has the values of the reference, to single precision."""
    for architecture, n in (
        (Architecture("gmf", dim=5), 9),
        (Architecture("mlp", mlp_embedding=7, layers=(9, 4)), 130),
        (Architecture("neumf"), 600),
    ):
        for own in (False, True):
            given = _example(architecture, users=2, n=n, own=own)
            expected = _by_reference(*given)
            for way in native.ncf_ways():
                found = _by_kernel(native, way, *given)
                for name in ("loss", "private", "rows", "network"):
                    one, other = getattr(found, name), getattr(expected, name)
                    if not np.allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max())):
                        return False
    return True


def _example(
    architecture: Architecture, users: int, n: int, own: bool = False
) -> tuple[Architecture, Floats, Floats, Floats, Floats, Floats]:
    """Return arguments of `gradients`, always the same."""
    rng = np.random.default_rng(0)
    private = rng.normal(0, 0.5, (users, architecture.width, 1)).astype(np.float32)
    rows = _with_one(rng.normal(0, 0.5, (users, n, architecture.width)).astype(np.float32))
    network = np.stack([initial_network(architecture, rng, -0.5) for _ in range(users)])
    label = (rng.random((users, n)) < 0.2).astype(np.float32)
    weight = rng.random((users, n), np.float32) / np.float32(n)
    return architecture, private, rows, network if own else network[0], label, weight


def _inputs(activation: Floats) -> Floats:
    """Return an activation without its last row, the constant 1."""
    return activation[:, :-1]


def _hidden(architecture: Architecture, private: Floats, rows: Floats, hidden: list[Floats]) -> list[Floats]:
    """Return the inputs of every layer of the MLP, each (users, inputs + 1, instances); the last row is 1.

    The first layer's inputs are the item's part only: the user's is added once per user, not once per instance.
    """
    activations = [rows]
    M = architecture.mlp_width
    for matrix in hidden:
        above = activations[-1]
        users = max(len(private), len(above))
        found = np.empty((users, matrix.shape[-2] + 1, above.shape[2]), np.float32)
        found[:, -1] = 1
        inner = found[:, :-1]
        if len(activations) == 1:
            np.matmul(matrix[..., M:], above, out=inner)
            inner += np.matmul(matrix[..., :M], private[:, -M:])
        else:
            np.matmul(matrix, above, out=inner)
        np.maximum(inner, 0, out=inner)
        activations.append(found)
    return activations


def scores(
    architecture: Architecture,
    items: Floats,
    network: Floats,
    private: Floats,
    candidates: NDArray[np.integer] | None = None,
) -> Floats:
    r"""Return the scores :math:`z` of some users for some items; the higher the better.

    Parameters
    ----------
    architecture : Architecture
    items : ndarray of float32, shape (n_items, width)
    network : ndarray of float32, shape (network_size,)
    private : ndarray of float32, shape (users, width)
    candidates : ndarray of int, shape (users, n), optional
        Each user's items; all items for everybody if left out.

    Returns
    -------
    ndarray of float32, shape (users, n) or (users, n_items)
        A user's scores do not depend on the other users asked for.
    """
    users = len(private)
    n = len(items) if candidates is None else candidates.shape[1]
    found = np.empty((users, n), np.float32)
    step = max(1, _BLOCK // max(n, 1))
    shared = _with_one(items[None]) if candidates is None else None
    for first in range(0, users, step):
        part = slice(first, min(first + step, users))
        rows = shared if shared is not None else _with_one(items[candidates[part]])  # type: ignore[index]
        found[part] = _scores(architecture, private[part, :, None], rows, network)
    return found


def _with_one(rows: Floats) -> Floats:
    """Return rows (users, n, width) as (users, width + 1, n) with a last coordinate of 1."""
    users, n, width = rows.shape
    found = np.ones((users, width + 1, n), np.float32)
    found[:, :-1] = rows.transpose(0, 2, 1)
    return found


def _scores(architecture: Architecture, private: Floats, rows: Floats, network: Floats) -> Floats:
    G = architecture.gmf_width
    hidden, output = architecture.views(network)
    z = np.zeros((len(private), 1, rows.shape[2]), np.float32)
    if G:
        v = private[:, :G] * output[:G, None]
        np.matmul(v.transpose(0, 2, 1), rows[:, :G], out=z)
    if hidden:
        z += np.matmul(output[None, None, G:], _hidden(architecture, private, rows[:, G:], hidden)[-1])
    else:
        z += output[-1]
    return z[:, 0]
