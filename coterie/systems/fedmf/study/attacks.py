"""Attacks on a run of FedMF.

Without biases contributions are first converted into those of FedMVMF: a row's change without the part of the ridge is
twice the rate times :math:`f(i, j)`, exactly so with one local epoch.  With biases a contribution tells more, and
has an attack of its own (`coterie.systems.fedmf.study.biased_reconstruction`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from coterie.studies.study import Recorded
from coterie.systems.fedmf.server import layouts
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmf.study.biased_reconstruction import reconstruct
from coterie.systems.fedmf.study.denoised import attack_noise_sums
from coterie.systems.fedmf.study.fillings import attack_values
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen

__all__ = ["attack"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Attack the server's transcript of a run of FedMF.

    Returns
    -------
    dict
        As `coterie.systems.shared.study.attacks.report`, which takes every touched item to be rated; and of a run with
        sampled items ``values`` (`coterie.systems.fedmf.study.fillings.attack_values`), of a denoised one also
        ``noise_sums`` (`coterie.systems.fedmf.study.denoised.attack_noise_sums`).
    """
    settings = FedMfSettings.from_json(recorded.plan.settings)
    shape = layouts(settings, recorded.truth.n_items)
    fitting = settings.factor_settings()
    if settings.biases:
        found = report(recorded, shape, fitting, own=partial(_biased, settings=settings))
    else:
        found = report(recorded, shape, fitting, partial(_gradients, settings=settings))
    if settings.samples and (values := attack_values(recorded, settings)) is not None:
        found["values"] = values
    if settings.samples and (told := attack_noise_sums(recorded, settings)) is not None:
        found["noise_sums"] = told
    return found


def _biased(seen: Seen, marginals: Marginals, *, first: bool, settings: FedMfSettings) -> Reconstruction:
    return reconstruct(seen, settings, marginals, first=first)


def _gradients(seen: Seen, settings: FedMfSettings) -> Seen:
    """Return FedMF's changes of rows as FedMVMF's gradients, averaged over the local epochs."""
    rate = settings.rate * settings.local_epochs
    ridge = np.where(seen.touched[:, None], 2 * settings.ridge * seen.item_factors, 0.0)
    return dataclasses.replace(
        seen,
        items=(seen.items / rate + ridge) / 2,
        noise=(seen.noise[0] / (2 * rate), seen.noise[1]),
        # Clipping applies to the change, whose bound is wider than any change by ratings.
        bounds=(np.inf, np.inf),
    )
