"""MovieLens' tag genome, the relevance of some thousand tags to each film, reduced to a few principal components."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coterie.data.attributes import AttributeTable
from coterie.data.dataset import Dataset
from coterie.data.tables import Dialect, read_text
from coterie.errors import DataError

__all__ = ["COMPONENTS", "has_genome", "read_genome"]

COMPONENTS = 20
"""Number of principal components that MVMF takes (6.1)."""

_FILE = "genome-scores.csv"


def has_genome(folder: str | Path) -> bool:
    """Return whether a folder has a tag genome."""
    return (Path(folder) / _FILE).is_file()


def read_genome(folder: str | Path, dataset: Dataset, components: int = COMPONENTS) -> AttributeTable:
    """Read ``genome-scores.csv`` and return the first principal components of the tags.

    MovieLens numbers films alike in all its sets, so the genome of a later one serves the ratings of an earlier one.
    Components are those of the data set's own items: centred, not scaled, each with the sign that makes its largest
    loading positive.

    Parameters
    ----------
    folder : str or Path
        Folder that has the file; it need not be the data set's own.
    dataset : Dataset
        MovieLens, with its own keys of items.
    components : int
        At least 1; no more than items with a genome, or tags.

    Returns
    -------
    AttributeTable
        Columns ``genome 1``, ``genome 2``...; missing for items without a genome.

    Raises
    ------
    DataError
        No such file, an item with more or fewer tags than others, a tag twice, a relevance outside 0 to 1, or fewer
        items or tags than components.
    """
    path = Path(folder) / _FILE
    table = read_text(path, Dialect(",", quoted=True))
    films, film = table.keys("movieId")
    tags, tag = table.keys("tagId")
    relevance = table.numbers("relevance", 0, 1)
    of_film = np.bincount(film * len(tags) + tag, minlength=len(films) * len(tags))
    if len(of_film) and (of_film != 1).any():
        wrong = films[int(np.argmax(of_film != 1)) // len(tags)]
        raise DataError(f"{path}: movie {wrong} lacks one of the {len(tags)} tags, or has one twice")
    row_of = {key: row for row, key in enumerate(films)}
    rows = np.array([row_of.get(key, -1) for key in dataset.items], np.int64)
    grid = np.empty((len(films), len(tags)))
    grid[film, tag] = relevance
    own = grid[rows[rows >= 0]]
    if not 1 <= components <= min(own.shape):
        raise DataError(
            f"{components} components of {len(own)} items with {len(tags)} tags; expected at least 1 and no more "
            "than either"
        )
    centred = own - own.mean(axis=0)
    # Eigenvectors of the tags' covariance: there are fewer tags than films.
    _, vectors = np.linalg.eigh(centred.T @ centred)
    loadings = vectors[:, ::-1][:, :components]
    largest = np.abs(loadings).argmax(axis=0)
    loadings = loadings * np.sign(loadings[largest, np.arange(components)])
    values = np.full((len(dataset.items), components), np.nan, np.float32)
    values[rows >= 0] = centred @ loadings
    return AttributeTable(tuple(f"genome {index + 1}" for index in range(components)), values)
