"""Rows of NCF with all data in one place: what a federation is measured against."""

from __future__ import annotations

from typing import Any

from coterie.config.run import RunSettings
from coterie.evaluation.leave_one_out import CHOOSE_BY
from coterie.evaluation.selection import Selection, Trained
from coterie.launch.feed import Feed
from coterie.launch.tables.row import Choices, LogUniform, Options, Row, Space
from coterie.learning import ncf
from coterie.learning.ncf import Architecture
from coterie.learning.ncf_central import CentralModel, CentralSettings, train

__all__ = ["central_row"]

_SPACE: Space = {
    "rate": LogUniform(3e-4, 3e-2),
    "batch_size": Choices((256, 1024, 4096)),
    "weight_decay": LogUniform(1e-7, 1e-3),
    "decay": Choices((1.0, 0.97, 0.9)),
}
"""What is tuned; the sizes of the model are the paper's in every row."""


def central_row(model: str, label: str) -> Row:
    """Return the row of a model trained with all data in one place.

    Parameters
    ----------
    model : {"gmf", "mlp", "neumf"}
    label : str
    """
    return Row(
        model,
        f"{label} centralised",
        _train,
        options={
            "model": model,
            "rate": 5e-3,
            "batch_size": 1024,
            "weight_decay": 0.0,
            "decay": 1.0,
            "epochs": 60,
        },
        space=_SPACE,
        note="all data in one place; stops when validation has not improved for 10 epochs",
    )


def _train(settings: RunSettings, options: Options, feed: Feed, seed: int) -> Trained:
    given: dict[str, Any] = dict(options)
    epochs, architecture = given.pop("epochs"), Architecture(given.pop("model"))
    holdout = feed.leave_one_out()
    selection = Selection(holdout)

    def evaluate(epoch: int, model: CentralModel, loss: float) -> float:
        def score(users: Any, items: Any = None) -> Any:
            return ncf.scores(architecture, model.items, model.network, model.users[users], items)

        return selection.see(epoch, score, score, train_loss=loss)[CHOOSE_BY]

    train(
        holdout.training(),
        holdout.n_items,
        CentralSettings(architecture, **given),
        epochs=epochs,
        seed=seed,
        on_epoch=evaluate,
    )
    return selection.trained()
