"""Tags of items for graph expansion: pseudonyms that users of a graph share and the third party cannot invert.

::

    B      = max(1, ceil(users / bucket_users))
    bucket = HMAC-SHA256(user secret, (graph-bucket, run, epoch, item)) mod B
    tag    = HMAC-SHA256(tag key, (graph-tag, run, epoch, item, bucket))

``users`` is how many users publish the item, a sum over all users that every client has.  Splitting the tags of popular
items makes their numbers of users nearly equal: a third party with public ratings would otherwise recognise most items
by them.  A user publishes few items, chosen by its secret, because the number of a user's tags tells users apart, too.
`coterie.privacy.attacks.tag_matching` measures both.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from coterie.crypto.explicit import encode
from coterie.errors import CryptoError

__all__ = ["TAG_BYTES", "bucket_counts", "bucket_of", "choose_items", "item_tag"]

TAG_BYTES = 32
_SECRET = 32


def bucket_counts(users: npt.NDArray[np.integer], bucket_users: int) -> npt.NDArray[np.int64]:
    """Return the number of buckets of each item.

    Parameters
    ----------
    users : ndarray of int, shape (I,)
        Number of users who publish each item.
    bucket_users : int
        Users who are to share a tag, about.

    Returns
    -------
    ndarray of int64, shape (I,)
        At least 1.

    Raises
    ------
    CryptoError
        A number is negative.
    """
    if bucket_users < 1 or (len(users) and int(users.min()) < 0):
        raise CryptoError("numbers of users are negative, or buckets are for no user")
    counts = -(-users.astype(np.int64) // bucket_users)
    return np.maximum(counts, 1)


def bucket_of(secret: bytes, run: str, epoch: int, item: str, buckets: int) -> int:
    """Return the user's bucket of an item, from 0.

    Parameters
    ----------
    secret : bytes
        The user's own secret, 32 bytes; it never leaves the host.
    run : str
    epoch : int
    item : str
        Key of the item.
    buckets : int
        Number of the item's buckets, at least 1.

    Raises
    ------
    CryptoError
        The secret has another size, or there is no bucket.
    """
    _check_secret(secret)
    if buckets < 1:
        raise CryptoError(f"{buckets} buckets, expected at least 1")
    return int.from_bytes(_mac(secret, encode("graph-bucket", run, epoch, item))) % buckets


def item_tag(tag_key: bytes, run: str, epoch: int, item: str, bucket: int) -> bytes:
    """Return the tag of an item's bucket, 32 bytes.

    Raises
    ------
    CryptoError
        The key has another size, or the bucket is out of range.
    """
    _check_secret(tag_key)
    return _mac(tag_key, encode("graph-tag", run, epoch, item, bucket))


def choose_items(
    secret: bytes, run: str, items: Collection[str], most: int, published: Sequence[str] = ()
) -> list[str]:
    """Choose the items that a user publishes: those published before, then others in an order of the user's own.

    The order depends on secret and run only, so that a user publishes the same items in every epoch.

    Parameters
    ----------
    secret : bytes
        The user's own secret, 32 bytes.
    run : str
    items : collection of str
        Keys of the items that the user has.
    most : int
        Most items to publish.
    published : sequence of str, optional
        Items published before, which stay.

    Returns
    -------
    list of str
        At most ``most``, or as many as were published.
    """
    _check_secret(secret)
    kept = list(dict.fromkeys(published))
    fresh = set(items).difference(kept)
    order = sorted(fresh, key=lambda item: _mac(secret, encode("graph-choice", run, item)))
    return kept + order[: max(0, most - len(kept))]


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _check_secret(secret: bytes) -> None:
    if len(secret) != _SECRET:
        raise CryptoError(f"a secret of {len(secret)} bytes, expected {_SECRET}")
