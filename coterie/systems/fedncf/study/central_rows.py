"""Table rows of NCF trained with all data in one place, the reference of a federation."""

from __future__ import annotations

from typing import Any

from coterie.config.run import RunSettings
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.studies.tables.row import Choices, LogUniform, Options, Row, Space
from coterie.systems.fedncf.central import CentralSettings
from coterie.systems.fedncf.networks import Architecture
from coterie.systems.fedncf.study.references import train_central

__all__ = ["central_row"]

_SPACE: Space = {
    "rate": LogUniform(3e-4, 3e-2),
    "batch_size": Choices((256, 1024, 2048, 4096)),
    "weight_decay": LogUniform(1e-7, 1e-3),
    "decay": Choices((1.0, 0.97, 0.96, 0.9)),
}
"""Search space of the options; the sizes of the model are the paper's in every row."""


_FOUND = {"gmf": (0.01, 2048, 1.0), "mlp": (0.002, 1024, 0.97), "neumf": (0.003, 1024, 0.96)}
"""Rate, batch size and decay, found on the validation items of MovieLens 100K."""


def central_row(model: str, label: str) -> Row:
    """Return the row of a model trained with all data in one place.

    Parameters
    ----------
    model : {"gmf", "mlp", "neumf"}
    label : str
    """
    rate, batch_size, decay = _FOUND[model]
    return Row(
        model,
        f"{label} centralised",
        _train,
        options={
            "model": model,
            "rate": rate,
            "batch_size": batch_size,
            "weight_decay": 0.0,
            "decay": decay,
            "epochs": 60,
        },
        space=_SPACE,
        found={"ml-100k": {}},
        note="all data in one place; stops when validation has not improved for 10 epochs",
    )


def _train(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    given: dict[str, Any] = dict(options)
    epochs, architecture = given.pop("epochs"), Architecture(given.pop("model"))
    return train_central(feed, CentralSettings(architecture, **given), epochs, seed)
