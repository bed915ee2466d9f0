"""Who is in a pseudo meta-latent: the attack of somebody who knows the cloud of candidates."""

import numpy as np
import pytest

from coterie.crypto.latent_weights import draw_combinations, weight_matrix
from coterie.errors import DataError
from coterie.privacy.attacks.latent_members import guess_members, share_named


def attacked(members, key_users=300, dimension=20, count=12):
    rows = np.random.default_rng(5).normal(0, 0.3, (key_users, dimension))
    drawn = draw_combinations(key_users, members, count)
    truth = np.array([one.members for one in drawn], np.intp)
    published = weight_matrix(drawn, key_users) @ rows
    return share_named(guess_members(published, rows, members), truth)


def test_the_plain_form_gives_every_member_away():
    rows = np.random.default_rng(5).normal(0, 0.3, (300, 20))
    truth = np.arange(0, 300, 25)[:, None]
    assert share_named(guess_members(rows[truth[:, 0]], rows, 1), truth) == 1.0


def test_combinations_of_more_members_are_harder_to_name_and_not_as_good_as_chance():
    few, many = attacked(3), attacked(10)
    assert few > 0.5
    assert many < few
    # Ten of 300 named by chance are a thirtieth.
    assert many > 2 * 10 / 300


def test_with_few_coordinates_members_are_not_determined():
    assert attacked(5, dimension=3) < 0.3


def test_candidates_of_another_shape_are_refused():
    with pytest.raises(DataError, match="2 candidates"):
        guess_members(np.zeros((1, 4)), np.zeros((2, 4)), 3)
