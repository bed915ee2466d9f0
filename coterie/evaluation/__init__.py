"""Evaluation: ranking and rating metrics per user, choice of versions, baselines, paired comparison."""

from coterie.evaluation.baselines import (
    als,
    damped_mean,
    from_factors,
    from_table,
    popularity,
    positive_share,
    random_scores,
)
from coterie.evaluation.holdout import headline
from coterie.evaluation.leave_one_out import LeaveOneOut, sample_negatives
from coterie.evaluation.metrics import pair_loss, ranking
from coterie.evaluation.paired import PairedDifference, paired_difference
from coterie.evaluation.rated import Rated, figures, graded_ndcg

__all__ = [
    "LeaveOneOut",
    "PairedDifference",
    "Rated",
    "als",
    "damped_mean",
    "figures",
    "from_factors",
    "from_table",
    "graded_ndcg",
    "headline",
    "pair_loss",
    "paired_difference",
    "popularity",
    "positive_share",
    "random_scores",
    "ranking",
    "sample_negatives",
]
