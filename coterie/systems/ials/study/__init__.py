"""Study of federated iALS: references and attacks."""

from __future__ import annotations

from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.studies.judges import one_held_out
from coterie.studies.study import Study
from coterie.systems.ials.study.attacks import attack
from coterie.systems.ials.study.references import references

__all__ = ["STUDY"]

_SPACE: Space = {
    "ials.factors": Choices((8, 16, 32)),
    "ials.ridge": LogUniform(1e-3, 0.1),
    "ials.alpha0": LogUniform(0.01, 1.0),
    "ials.nu": Choices((0.5, 0.75, 1.0)),
    "ials.popularity": Choices((0.0, 0.003, 0.01, 0.03, 0.1)),
}

STUDY = Study(attack=attack, references=references, space=_SPACE, judged=one_held_out)
