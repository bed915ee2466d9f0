"""How good a ranking is: metrics per user, and the trivial rows that every table carries."""

from coterie.evaluation.baselines import popularity, positive_share, random_scores
from coterie.evaluation.holdout import headline
from coterie.evaluation.metrics import pair_loss, ranking

__all__ = ["headline", "pair_loss", "popularity", "positive_share", "random_scores", "ranking"]
