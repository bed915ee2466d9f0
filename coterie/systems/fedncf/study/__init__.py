"""Study of FedNCF: references, attacks and tables."""

from __future__ import annotations

from coterie.evaluation.search import Choices, Space
from coterie.studies.judges import one_held_out
from coterie.studies.study import Study
from coterie.systems.fedncf.study.attacks import attack
from coterie.systems.fedncf.study.federated_rows import SPACE
from coterie.systems.fedncf.study.references import references
from coterie.systems.fedncf.study.table import FEDNCF

__all__ = ["STUDY"]

_SPACE: Space = {**SPACE, "fedncf.popularity": Choices((0.0, 0.1, 0.3, 1.0, 3.0))}

STUDY = Study(attack=attack, references=references, tables=(FEDNCF,), space=_SPACE, judged=one_held_out)
