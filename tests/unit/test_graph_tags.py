"""Tags, buckets and the choice of items; against a computation of the test's own."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.graph_tags import bucket_counts, bucket_of, choose_items, item_tag
from coterie.errors import CryptoError

from .test_graph_key import explicit

KEY, SECRET = bytes(range(32)), bytes(range(100, 132))


def mac(key, message):
    found = HMAC(key, SHA256())
    found.update(message)
    return found.finalize()


def test_a_tag_is_the_hmac_that_the_book_says():
    assert item_tag(KEY, "a-run", 3, "item-ü", 7) == mac(KEY, explicit("graph-tag", "a-run", 3, "item-ü", 7))


def test_a_tag_depends_on_key_run_epoch_item_and_bucket():
    usual = {"tag_key": KEY, "run": "a-run", "epoch": 3, "item": "x", "bucket": 0}
    others = [{"tag_key": SECRET}, {"run": "b-run"}, {"epoch": 4}, {"item": "y"}, {"bucket": 1}]
    assert len({item_tag(**usual), *(item_tag(**{**usual, **one}) for one in others)}) == 6


@given(st.integers(1, 1000), st.text(max_size=20), st.integers(1, 100))
def test_a_bucket_is_the_remainder_that_the_book_says(buckets, item, epoch):
    message = explicit("graph-bucket", "a-run", epoch, item)
    expected = int.from_bytes(mac(SECRET, message), "big") % buckets
    assert bucket_of(SECRET, "a-run", epoch, item, buckets) == expected


def test_buckets_of_a_popular_item_have_about_as_many_users_each():
    secrets = [bytes([n % 256, n // 256]) * 16 for n in range(2000)]
    counts = np.bincount([bucket_of(secret, "a-run", 1, "x", 100) for secret in secrets], minlength=100)
    # 20 of 2,000 each: a binomial's standard deviation is 4.45.
    assert counts.sum() == 2000
    assert 2 < counts.min() <= counts.max() < 45
    assert 3.3 < counts.std() < 5.6


def test_the_number_of_buckets_is_the_users_by_twenty_rounded_up():
    users = np.array([0, 1, 20, 21, 40, 41, 583])
    assert bucket_counts(users, 20).tolist() == [1, 1, 1, 2, 2, 3, 30]
    with pytest.raises(CryptoError):
        bucket_counts(np.array([-1]), 20)


def test_what_is_published_stays_and_new_items_come_in_an_order_of_the_users_own():
    items = [f"item-{n}" for n in range(50)]
    first = choose_items(SECRET, "a-run", items[:30], 10)
    order = sorted(items[:30], key=lambda item: mac(SECRET, explicit("graph-choice", "a-run", item)))
    assert first == order[:10]
    assert choose_items(SECRET, "a-run", items, 10, first) == first
    more = choose_items(SECRET, "a-run", items, 12, first)
    assert more[:10] == first
    assert len(set(more)) == 12
    assert choose_items(KEY, "a-run", items[:30], 10) != first
    # Also in another order, and with repetitions.
    assert choose_items(SECRET, "a-run", [*items[:30][::-1], *items[:5]], 10) == first


@pytest.mark.parametrize("bad", [b"", bytes(31), bytes(33)])
def test_keys_and_secrets_of_another_size_are_refused(bad):
    with pytest.raises(CryptoError):
        item_tag(bad, "a-run", 1, "x", 0)
    with pytest.raises(CryptoError):
        bucket_of(bad, "a-run", 1, "x", 1)
    with pytest.raises(CryptoError):
        choose_items(bad, "a-run", ["x"], 1)


def test_there_is_no_bucket_of_none():
    with pytest.raises(CryptoError):
        bucket_of(SECRET, "a-run", 1, "x", 0)
