"""Metrics and layouts of FedNCF's contributions by purpose of their sum, for both sides and the attacks."""

from __future__ import annotations

from coterie.evaluation.leave_one_out import metric_names
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedncf.mathematics import layout
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.shared.metric_segments import measure_segments

__all__ = ["layout_of", "metrics_of"]


def metrics_of(purpose: Purpose) -> tuple[str, ...]:
    """Return the metrics of a purpose; training ranks among the sampled items only, which is quick."""
    return metric_names(everything=purpose is Purpose.EVALUATE)


def layout_of(settings: FedNcfSettings, purpose: Purpose, n_items: int) -> Layout:
    """Return the layout of a contribution to a sum of a purpose.

    Parameters
    ----------
    settings : FedNcfSettings
    purpose : Purpose
    n_items : int
        Items of the catalogue.

    Returns
    -------
    Layout
        A count of users for each item (``supports``), metrics (``evaluate``), or the changes of the model with their
        divisors, then metrics (``train``).
    """
    match purpose:
        case Purpose.SUPPORTS:
            return Layout((Segment.whole("supports", (n_items,), 1),))
        case Purpose.EVALUATE:
            return Layout(measure_segments(metrics_of(purpose), settings.metric_bits))
        case Purpose.TRAIN:
            return layout(settings, n_items, measure_segments(metrics_of(purpose), settings.metric_bits))
