"""The best unseen items of a user, beside a sort of all scores."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.evaluation.unseen import best_unseen

SCORES = st.lists(
    st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, float("nan"), float("inf")]), min_size=1, max_size=30
)


def sorted_all(scores: np.ndarray, seen: set[int], k: int) -> list[str]:
    """Return the best items by a stable sort of everything."""
    if len(scores) > 1 and (scores == scores[0]).all():
        return []
    order = np.argsort(-scores, kind="stable")[: k + len(seen)]
    return [str(one) for one in order.tolist() if one not in seen][:k]


@given(scores=SCORES, seen=st.sets(st.integers(0, 29), max_size=8), k=st.integers(1, 12))
def test_the_best_are_those_of_a_stable_sort(scores: list[float], seen: set[int], k: int) -> None:
    values = np.array(scores, np.float32)
    own = {one for one in seen if one < len(values)}
    items, found = best_unseen([str(place) for place in range(len(values))], values, own, k)
    assert items == sorted_all(values, own, k)
    np.testing.assert_array_equal(np.array(found, np.float32), values[[int(one) for one in items]])
