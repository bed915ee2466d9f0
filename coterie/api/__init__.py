"""The Python interface: data, splits, recommenders, runs and comparisons.

``import coterie`` gives all of it by name, and loads it with the first name that is used.  Classes of recommenders are
made for every registered system and every central model (`models`).
"""

from coterie.api.comparison import ComparedRecommenders, compare
from coterie.api.connection import FederationConnection, OperatedRun, connect
from coterie.api.data import Data, DataSplit, load
from coterie.api.federated_run import FederatedRun, Receipt
from coterie.api.finished_model import CentralModelOfFolder, FinishedModel, LoadedModel, load_model
from coterie.api.fitted import FittedCentral, FittedModel
from coterie.api.recommenders import (
    CentralRecommender,
    FederatedRecommender,
    Recommender,
    models,
)
from coterie.api.report_page import ReportPage
from coterie.api.run_list import runs
from coterie.errors import CoterieError

__all__ = [
    "CentralModelOfFolder",
    "CentralRecommender",
    "ComparedRecommenders",
    "CoterieError",
    "Data",
    "DataSplit",
    "FederatedRecommender",
    "FederatedRun",
    "FederationConnection",
    "FinishedModel",
    "FittedCentral",
    "FittedModel",
    "LoadedModel",
    "OperatedRun",
    "Receipt",
    "Recommender",
    "ReportPage",
    "compare",
    "connect",
    "load",
    "load_model",
    "models",
    "runs",
]
