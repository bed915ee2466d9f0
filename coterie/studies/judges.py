"""Simple judges in the report of a run: central models that are cheap to fit, on the run's data, split and metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from coterie.config.run import RunSettings
from coterie.evaluation.central import Central, Ease, ItemKnn, MostPopular, Random, ScoreItems
from coterie.evaluation.holdout import headline
from coterie.evaluation.threads import one_thread
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.studies.study import study_of

__all__ = ["JUDGES", "one_held_out", "references"]

JUDGES: tuple[type[Central], ...] = (MostPopular, ItemKnn, Ease, Random)
"""Central models of a report, with their default hyper-parameters."""

_LARGEST_CATALOGUE = 4000
"""Most items for which models of items by items are fitted in a run: well below a minute on two cores."""


def references(
    settings: RunSettings, feed: Feed, seed: int, *, say: Callable[[str], None] = lambda name: None
) -> dict[str, Reference]:
    """Return the reference rows of a run: those of the system's study, then simple judges where the system ranks items.

    Parameters
    ----------
    settings : RunSettings
    feed : Feed
    seed : int
        Seed of training and of random order.
    say : callable, optional
        Receives the name of each row as it begins.
    """
    study = study_of(settings.system)
    say("the same model in one place")
    with one_thread():
        own = study.references(settings, feed, seed)
    if study.judged is None:
        return own
    measure = study.judged(settings, feed)
    data = feed.training()
    found = dict(own)
    for model in _worth(len(feed.dataset.items), own):
        say(model.label)
        fitted = model(seed=seed).fit(data)
        found[_key(model)] = Reference(dict(measure(fitted.score)), [], model.label, model.note)
    return found


def one_held_out(settings: RunSettings, feed: Feed) -> Callable[[ScoreItems], Mapping[str, float]]:
    """Return the measure of systems with one held-out item of each user (`Study.judged`)."""
    holdout = feed.leave_one_out()
    return lambda score: headline(holdout.measure(score, score))


def _worth(items: int, own: Collection[str]) -> list[type[Central]]:
    """Return the judges that are cheap on a catalogue and that the study does not measure itself."""
    dear = (ItemKnn, Ease) if items > _LARGEST_CATALOGUE else ()
    return [model for model in JUDGES if model not in dear and _key(model) not in own]


def _key(model: type[Central]) -> str:
    return model.name.replace("-", "_")
