"""Attacks on a run of FedMF, whose contributions are first converted into those of FedMVMF.

A row's change without the part of the ridge is twice the rate times :math:`f(i, j)`, exactly so with one local epoch.
With biases ratings are attacked, and errors reported, on the scale from -1 to 1 on which they are learned.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from coterie.studies.study import Recorded
from coterie.systems.fedmf.mathematics import moving, scaled
from coterie.systems.fedmf.server import layouts
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.reconstruction import Seen

__all__ = ["attack"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Attack the server's transcript of a run of FedMF (`coterie.systems.shared.study.attacks.report`)."""
    settings = FedMfSettings.from_json(recorded.plan.settings)
    return report(
        dataclasses.replace(recorded, ratings=scaled(settings, recorded.ratings)),
        layouts(settings, recorded.truth.n_items),
        settings.factor_settings().model_copy(
            update=dict(zip(("lowest", "highest"), settings.scale, strict=True))
        ),
        partial(_gradients, settings=settings),
    )


def _gradients(seen: Seen, settings: FedMfSettings) -> Seen:
    """Return FedMF's changes of rows as FedMVMF's gradients, averaged over the local epochs."""
    rate = settings.rate * settings.local_epochs
    ridge = np.where(seen.touched[:, None], 2 * settings.ridge * seen.item_factors * moving(settings)[1], 0.0)
    return dataclasses.replace(
        seen,
        items=(seen.items / rate + ridge) / 2,
        noise=(seen.noise[0] / (2 * rate), seen.noise[1]),
        # Clipping applies to the change, whose bound is wider than any change by ratings.
        bounds=(np.inf, np.inf),
    )
