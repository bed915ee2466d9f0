"""Settings of FedMF that tuning searches, in its tables and beside other systems."""

from __future__ import annotations

from coterie.evaluation.search import Choices, LogUniform, Space

__all__ = ["SPACE"]

SPACE: Space = {
    "fedmf.biases": Choices((True,)),
    "fedmf.factors": Choices((10, 20, 40)),
    "fedmf.local_epochs": Choices((2, 5, 10)),
    "fedmf.rate": LogUniform(0.1, 0.4),
    "fedmf.private_rate": LogUniform(0.1, 0.4),
    "fedmf.ridge": LogUniform(0.005, 0.1),
}
