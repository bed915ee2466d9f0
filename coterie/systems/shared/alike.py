"""How alike items are in a model whose items have vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["ComparedByVectors"]


class ComparedByVectors:
    """A host's side that compares items by the cosine of their vectors in the model."""

    likeness = "cosine of the items' vectors"

    def item_vectors(self, model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the items' vectors, float32 (I, K), without values that are no part of them."""
        return model["items"]

    def alike(
        self,
        model: Mapping[str, NDArray[np.float32]],
        items: NDArray[np.integer],
        others: NDArray[np.integer],
    ) -> NDArray[np.float64]:
        """Return the cosine of each of some items with each of others, float64 (items, others); 0 without a vector."""
        vectors = self.item_vectors(model)
        found: NDArray[np.float64] = _unit(vectors[items]) @ _unit(vectors[others]).T
        return found


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    length = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    found: NDArray[np.float64] = np.divide(rows, length, out=np.zeros(rows.shape), where=length > 0)
    return found
