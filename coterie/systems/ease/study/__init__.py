"""Study of EASE: references and attacks."""

from __future__ import annotations

from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.studies.judges import one_held_out
from coterie.studies.study import Study
from coterie.systems.ease.study.attacks import attack
from coterie.systems.ease.study.references import references

__all__ = ["STUDY"]

_SPACE: Space = {
    "ease.ridge": LogUniform(10.0, 5000.0),
    "ease.popularity": Choices((0.0, 0.003, 0.01, 0.03, 0.1)),
}

STUDY = Study(references=references, attack=attack, space=_SPACE, judged=one_held_out)
