"""The attacks on a run of FedMF, whose contributions are turned into those of FedMVMF.

A change of a row, less what the ridge did to it, is twice the rate times :math:`f(i, j)`; exactly so with one local
epoch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from coterie.privacy.attacks.reconstruction import Seen
from coterie.studies.study import Recorded
from coterie.systems.fedmf.mathematics import FedMfSettings, shared
from coterie.systems.fedmf.server import FedMfPlan
from coterie.systems.shared.study.attacks import report

__all__ = ["attack"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Attack the server's transcript of a run of FedMF (`coterie.systems.shared.study.attacks.report`)."""
    settings = FedMfPlan.from_json(recorded.plan.settings)
    learning = settings.learning
    return report(recorded, settings, shared(learning), partial(_gradients, stepping=learning))


def _gradients(seen: Seen, stepping: FedMfSettings) -> Seen:
    """Return FedMF's changes of rows as FedMVMF's gradients; of several local epochs what all of them come to."""
    rate = stepping.rate * stepping.local_epochs
    ridge = np.where(seen.touched[:, None], 2 * stepping.ridge * seen.item_factors, 0.0)
    return dataclasses.replace(
        seen,
        items=(seen.items / rate + ridge) / 2,
        noise=(seen.noise[0] / (2 * rate), seen.noise[1]),
        # What is clipped is the change, and the bound leaves room for more than ratings can do.
        bounds=(np.inf, np.inf),
    )
