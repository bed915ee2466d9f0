"""Study of FedIDCF: references, attacks and tables."""

from __future__ import annotations

from coterie.studies.study import Study

__all__ = ["STUDY"]

STUDY = Study()
