"""Study of EASE: references and attacks."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.ease.study.attacks import attack
from coterie.systems.ease.study.references import references

__all__ = ["STUDY"]

STUDY = Study(references=references, attack=attack)
