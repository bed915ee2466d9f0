"""Tags of graph expansion, attacked by a third party with public ratings."""

import numpy as np
import pytest

from coterie.data.synthetic import SyntheticSpec, generate
from coterie.errors import DataError
from coterie.privacy.attacks.tag_matching import TagView, match_by_likelihood, match_by_signature
from coterie.studies.tag_matching import attack_graph, publish_graph, view_of_store

ALL, UNSPLIT = 1024, 1 << 20


@pytest.fixture(scope="module")
def dataset():
    return generate(SyntheticSpec(users=300, items=250, interactions=15_000, seed=3))


@pytest.fixture(scope="module")
def attacked(dataset, tmp_path_factory):
    """Return a function that publishes the data set in a form, and attacks the store; each form once."""
    done = {}

    def attack(most_tags, bucket_users):
        form = most_tags, bucket_users
        if form not in done:
            folder = tmp_path_factory.mktemp("graph")
            graph = publish_graph(dataset, folder, most_tags, bucket_users, seed=0)
            done[form] = attack_graph(graph, folder / "expansion.db"), graph, folder
        return done[form]

    return attack


def test_the_store_tells_pairs_of_tags_and_uploads(attacked):
    _, graph, folder = attacked(ALL, UNSPLIT)
    view, tags, uploads = view_of_store(folder / "expansion.db")
    assert len(view.tags) == graph.ratings.sum()
    seen = np.zeros_like(graph.ratings)
    items = np.array([graph.item_of_tag[tag] for tag in tags])
    users = np.array([graph.user_of_upload[upload] for upload in uploads])
    seen[users[view.uploads], items[view.tags]] = True
    np.testing.assert_array_equal(seen, graph.ratings)


def test_signatures_tell_unsplit_tags_and_not_bucketed_ones_with_a_cap(attacked):
    plain, bucketed = attacked(ALL, UNSPLIT)[0], attacked(20, 20)[0]
    assert plain["signature"]["tags"] > 0.9
    assert bucketed["signature"]["tags"] < 0.01


def test_a_cap_hides_users_and_tags_from_likelihood(attacked):
    plain, split, capped = (attacked(*form)[0] for form in ((ALL, UNSPLIT), (ALL, 20), (20, 20)))
    assert plain["likelihood"]["tags"] > 0.9
    assert plain["likelihood"]["uploads"] > 0.9
    # Buckets alone leave much to be told; a cap leaves little.
    assert split["likelihood"]["tags"] > 3 * capped["likelihood"]["tags"]
    assert split["likelihood"]["uploads"] > 0.2
    assert capped["likelihood"]["tags"] < 0.05
    assert capped["likelihood"]["uploads"] < 0.05


def test_who_colludes_with_a_client_or_with_the_cos_knows_nearly_everything(attacked):
    found = attacked(20, 20)[0]
    assert found["with a client"]["tags"] == 1.0
    assert found["with a client"]["uploads"] > 0.9
    assert found["with the COS"]["uploads"] == 1.0
    assert found["with the COS"]["tags"] > 0.5


def test_tags_with_the_same_signature_are_told_from_none():
    ratings = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool)
    view = TagView(np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 2]), 3, 3)
    matched = match_by_signature(view, ratings)
    assert matched.items.tolist() == [-1, -1, 2]


def test_likelihood_finds_the_only_items_that_fit():
    ratings = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
    users, items = np.nonzero(ratings)
    order = np.array([2, 0, 1, 3])
    view = TagView(order[items], users, 4, 3)
    published = ratings.sum(axis=0)
    found = match_by_likelihood(view, ratings, published, np.ones(4, np.int64), 10, rounds=2)
    assert found.items[order[:3]].tolist() == [0, 1, 2]
    assert found.users.tolist() == [0, 1, 2]


def test_a_view_whose_numbers_do_not_fit_is_refused():
    with pytest.raises(DataError, match="not pairs"):
        TagView(np.array([0]), np.array([0, 1]), 1, 2)
    with pytest.raises(DataError, match="outside"):
        TagView(np.array([1]), np.array([0]), 1, 1)
