"""Study of FedGNN: references and attacks."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.fedgnn.study.attacks import attack
from coterie.systems.fedgnn.study.references import fedgnn_references

__all__ = ["STUDY"]

STUDY = Study(attack=attack, references=fedgnn_references)
