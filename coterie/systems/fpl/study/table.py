"""Table of FPL: the share of positive updates that users send, from 0 to 1, the four forms, and central models.

The paper's figures are of check-ins of three countries that are not public in this form; the table shows ours alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.central import Bpr, Central, Ease, ItemKnn, MostPopular, Random, UserKnn
from coterie.evaluation.rated import figures
from coterie.evaluation.selection import SelectedModel
from coterie.rounds.sides import HostSide
from coterie.rounds.training import Training
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import PaperTable
from coterie.studies.tables.printed_tables import PaperLine, beside, differences
from coterie.studies.tables.row import Options, Row, configured
from coterie.studies.tables.users_values import trained_with_values
from coterie.systems.fpl.host import FplHost
from coterie.systems.fpl.study.attacks import signs_of_a_round
from coterie.systems.shared.study.references import only
from coterie.systems.shared.study.taken_up import held_out
from coterie.systems.shared.taken_up import CHOOSE_BY, FIGURES

__all__ = ["CENTRAL", "FORMS", "FPL", "SHARES", "share_row"]

SHARES = tuple(tenths / 10 for tenths in range(11))
"""Values of pi that are compared, as in the paper."""

FORMS: Mapping[str, tuple[str, Options]] = {
    "sfpl": ("sFPL", {"fpl.triples_per_item": 0}),
    "sfpl-plus": ("sFPL+", {"fpl.triples_per_item": 1}),
    "pfpl": ("pFPL", {"fpl.triples_per_item": 0}),
}
"""Label and options of the forms besides pFPL+, by row."""

CENTRAL: tuple[type[Central], ...] = (Random, MostPopular, UserKnn, ItemKnn, Ease, Bpr)
"""Models with all data in one place."""

_ALONE: Options = {
    "rounds.cohorts": "random",
    "rounds.cohort": 1,
    "rounds.min_cohort": 1,
    "rounds.min_sum": 1,
    # A moment that moves all rows after each single user would not be the paper's step.
    "fpl.server_optimiser": "fedsgd",
    "fpl.server_rate": 0.05,
}


def share_row(pi: float) -> str:
    """Return the name of the row of pFPL+ with a share of positive updates."""
    return f"pfpl-plus-pi-{round(100 * pi)}"


def _federated(settings: RunSettings, feed: Feed, seed: int) -> SelectedModel:
    """Train a run in this process; keep the users' figures, and what their signs tell, at the version that counts."""
    told: dict[str, float] = {}

    def tell(state: Training, hosts: Sequence[HostSide], model: Mapping[str, NDArray[np.float32]]) -> None:
        told.update(signs_of_a_round(cast(Sequence[FplHost], hosts), model, state.round + 1))

    made, kept = trained_with_values(settings, feed, seed, on_best=tell)
    known = made.known
    history = [{"step": one["epoch"], "metrics": one["metrics"]} for one in known["history"]]
    best = [one["version"] for one in known["history"]].index(known["chosen"]["version"])
    facts = {
        "secure_sum": settings.secure_sum,
        "cohorts": settings.rounds.cohorts,
        "abandoned": known["abandoned"],
        "withheld": known["closed_share"],
        "engine": "in one process",
    }
    metrics = {**known["chosen"]["metrics"], **told}
    return SelectedModel(history, best, metrics, known["chosen"]["users"], kept, facts)


def _central_row(model: type[Central]) -> Row:
    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        values = held_out(feed).measure(model.of(options, seed).fit(feed.training()).score)
        metrics = only(figures(values), FIGURES)
        ranked = {name: value for name, value in values.items() if name in FIGURES}
        users = {name: int(np.count_nonzero(~np.isnan(value))) for name, value in ranked.items()}
        return SelectedModel(({"step": 0, "metrics": metrics},), 0, metrics, users, ranked)

    return Row(
        model.name, model.label, engine, options=model.defaults(), space=model.space(), note=model.note
    )


def _rows() -> tuple[Row, ...]:
    train = configured(_federated)
    shares = [
        Row(share_row(pi), f"pFPL+, pi {pi:.1f}", train, options={"fpl.pi": pi}, defaults=True)
        for pi in SHARES
    ]
    forms = [
        Row(
            name, label, train, options={**(_ALONE if name.startswith("s") else {}), **options}, defaults=True
        )
        for name, (label, options) in FORMS.items()
    ]
    return (*shares, *forms, *map(_central_row, CENTRAL))


def _lines() -> tuple[PaperLine, ...]:
    return tuple(PaperLine(row.name, row.label, variant=True) for row in _rows())


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


_COMPARED = (
    (share_row(0.1), share_row(1.0)),
    (share_row(0.5), share_row(1.0)),
    *((share_row(pi), Bpr.name) for pi in SHARES),
)
_COLUMNS = {
    "precision@10": "P@10",
    "recall@10": "R@10",
    "ndcg@10": "NDCG@10",
    CHOOSE_BY: "validation\nNDCG@10",
    "signs_auc": "signs\nin clear",
    "signs_auc_sum": "signs\nof the sum",
    "popularity_auc": "by\npopularity",
}

FPL = PaperTable(
    name="fpl",
    title="FPL: the share of positive updates that users send",
    paper="FPL (Anelli et al., 2022), table 1 and its study of pi",
    settings={"secure_sum": "masked"},
    prepare=_prepare,
    rows=_rows,
    sections=(
        beside(
            "Shares, forms and central models",
            {"": _lines()},
            {},
            _COLUMNS,
            notes=(
                "Rankings of all items that a user has not been seen with; every held-out item is relevant.",
                "Versions and settings are chosen by the validation items.",
                "Signs: AUC of telling items of up to 200 users by one more round's moves of the biases, from each",
                "user's contribution in clear, or from the sum over all users. Popularity alone is beside them.",
            ),
        ),
        differences("Paired differences over users", _COMPARED, ("precision@10", "recall@10", "ndcg@10")),
    ),
    headline="precision@10",
    choose_by=CHOOSE_BY,
    compared=_COMPARED,
    compared_by=("precision@10", "recall@10", "ndcg@10"),
    studies={"forms": tuple(FORMS)},
    system="fpl",
)
