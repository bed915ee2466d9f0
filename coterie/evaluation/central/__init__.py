"""Central models: simple judges that learn with all data in one place, under one interface."""

from coterie.evaluation.central.ease import Ease
from coterie.evaluation.central.factors import Als, Bpr, Ials
from coterie.evaluation.central.inductive import Idcf, RidgeFoldIn
from coterie.evaluation.central.interactions import Interactions
from coterie.evaluation.central.model import Central, CentralModel, ScoreItems, hyperparameter
from coterie.evaluation.central.neighbours import ItemKnn, UserKnn
from coterie.evaluation.central.ratings import BiasedMf, GlobalMean, ItemMean, UserItemBiases
from coterie.evaluation.central.trivial import MostPopular, Random

__all__ = [
    "PREDICTORS",
    "RANKERS",
    "Als",
    "BiasedMf",
    "Bpr",
    "Central",
    "CentralModel",
    "Ease",
    "GlobalMean",
    "Ials",
    "Idcf",
    "Interactions",
    "ItemKnn",
    "ItemMean",
    "MostPopular",
    "Random",
    "RidgeFoldIn",
    "ScoreItems",
    "UserItemBiases",
    "UserKnn",
    "hyperparameter",
]

RANKERS: tuple[type[Central], ...] = (Random, MostPopular, UserKnn, ItemKnn, Ease, Ials, Bpr, Als)
"""Models that rank items, from interactions without ratings."""

PREDICTORS: tuple[type[Central], ...] = (GlobalMean, ItemMean, UserItemBiases, BiasedMf)
"""Models that predict ratings."""
