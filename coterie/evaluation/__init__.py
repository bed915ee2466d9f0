"""How good a ranking is: metrics per user, and the trivial rows that every table carries."""

from coterie.evaluation.baselines import popularity, positive_share, random_scores
from coterie.evaluation.metrics import pair_loss, ranking, summed

__all__ = ["pair_loss", "popularity", "positive_share", "random_scores", "ranking", "summed"]
