"""FedNCF: federated neural collaborative filtering, with GMF, MLP or NeuMF."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.fedncf import local_step, networks
from coterie.systems.fedncf.host import FedNcfHost
from coterie.systems.fedncf.report import FedNcfReport
from coterie.systems.fedncf.server import FedNcfServer
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.shared.declared_rounds import declared_in_rounds

__all__ = ["SYSTEM"]

SYSTEM = System(
    name="fedncf",
    title="FedNCF",
    paper="Perifanis and Efraimidis, Federated Neural Collaborative Filtering, 2022",
    settings=FedNcfSettings,
    page="docs/systems/fedncf.md",
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    # The first two are among 100 sampled items, the others among all unseen ones.
    shown=("hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "ndcg_all@10"),
    usual={"split": {"kind": "leave-last-out"}, "rounds": {"passes": 300}},
    server=FedNcfServer.of_plan,
    host=FedNcfHost.of_plan,
    report=FedNcfReport,
    grows=True,
    kernels=(networks.compare_kernel, local_step.compare_kernel),
    study="coterie.systems.fedncf.study",
)
