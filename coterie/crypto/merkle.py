"""An append-only Merkle tree with the hashes of RFC 6962, and the proofs by which others check it.

The root of a tree of size ``n`` binds all of its ``n`` entries in their order.  An *inclusion proof* shows that an
entry is in a tree, a *joint proof* the same of many entries at once with each inner node sent at most once, a
*consistency proof* that a tree begins with all entries of a smaller one.  Leaves are hashed with
a zero byte before them, inner nodes with a one, so no node can be shown as a leaf.  Assumed: SHA-256 (collision
resistant).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from coterie.crypto.verification import Reason, VerificationError

__all__ = [
    "EMPTY_ROOT",
    "RunningRoot",
    "Tree",
    "check_consistency",
    "check_inclusion",
    "check_inclusions",
    "leaf_hash",
]

_LEAF, _NODE = b"\x00", b"\x01"
_HASH = 32

EMPTY_ROOT = hashlib.sha256(b"").digest()
"""Root of the tree without entries."""


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of an entry, 32 bytes."""
    return hashlib.sha256(_LEAF + entry).digest()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


def _split(count: int) -> int:
    """Return the largest power of two below a count of at least 2: the leaves of the left subtree."""
    return 1 << (count - 1).bit_length() - 1


class Tree:
    """A growing tree in memory that knows its roots and proofs at every size that it has had.

    It keeps the hash of each complete subtree: 64 bytes an entry.  Not safe to share between threads while it grows.
    """

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        # Level k holds the hashes of the complete subtrees of 2^k leaves, from left to right.
        self._levels = [bytearray()]

    def __len__(self) -> int:
        return len(self._levels[0]) // _HASH

    def append(self, leaf: bytes) -> None:
        """Add the hash of an entry (32 bytes) at the right end.

        Raises
        ------
        ValueError
            It is no hash.
        """
        if len(leaf) != _HASH:
            raise ValueError(f"a leaf hash of {len(leaf)} bytes, expected {_HASH}")
        found, level, count = leaf, 0, len(self) + 1
        self._levels[0] += leaf
        while count % 2 == 0:
            count //= 2
            left = self._complete(level, count * 2 - 2)
            found, level = _node_hash(left, found), level + 1
            if level == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level] += found

    def root(self, size: int | None = None) -> bytes:
        """Return the root (32 bytes) of the tree of the first ``size`` entries; of all by default.

        Raises
        ------
        ValueError
            The tree has fewer entries.
        """
        size = self._checked(len(self) if size is None else size)
        return self._subtree(0, size) if size else EMPTY_ROOT

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Return the proof that the entry at ``index`` is in the tree of ``size`` entries, hashes from the leaf up.

        Raises
        ------
        ValueError
            The tree has fewer entries, or that one is not among them.
        """
        self._checked(size)
        if not 0 <= index < size:
            raise ValueError(f"entry {index} of a tree of {size}")
        proof, start, end = list[bytes](), 0, size
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                proof.append(self._subtree(middle, end))
                end = middle
            else:
                proof.append(self._subtree(start, middle))
                start = middle
        return proof[::-1]

    def inclusions(self, indices: Sequence[int], size: int) -> list[bytes]:
        """Return the joint proof that the entries at ``indices`` are in the tree of ``size`` entries.

        It has the roots of the largest subtrees without any of these entries, from left to right: a few hashes for a
        run of neighbouring entries, however long.

        Parameters
        ----------
        indices : sequence of int
            Strictly ascending, at least one.
        size : int

        Raises
        ------
        ValueError
            The tree has fewer entries, one of these is not among them, or they do not ascend.
        """
        self._checked(size)
        if not _ascending(indices, size):
            raise ValueError(f"{len(indices)} entries of a tree of {size}, expected some, in ascending order")
        proof = list[bytes]()

        def walk(start: int, end: int, low: int, high: int) -> None:
            # Entries indices[low:high] are those within [start, end).
            if low == high:
                proof.append(self._subtree(start, end))
            elif end - start > 1:
                middle = start + _split(end - start)
                between = bisect_left(indices, middle, low, high)
                walk(start, middle, low, between)
                walk(middle, end, between, high)

        walk(0, size, 0, len(indices))
        return proof

    def consistency(self, first: int, second: int) -> list[bytes]:
        """Return the proof that the tree of ``second`` entries begins with that of ``first``.

        It is empty where ``first`` is 0 or ``second``.

        Raises
        ------
        ValueError
            The tree has fewer entries, or the sizes are in the wrong order.
        """
        self._checked(second)
        if not 0 <= first <= second:
            raise ValueError(f"a tree of {first} entries before one of {second}")
        if first in (0, second):
            return []
        proof, start, end, known = list[bytes](), 0, second, True
        while first != end:
            middle = start + _split(end - start)
            if first <= middle:
                proof.append(self._subtree(middle, end))
                end = middle
            else:
                proof.append(self._subtree(start, middle))
                start, known = middle, False
        # The verifier knows the smaller tree's root, unless its last subtree is only a part of it.
        return ([] if known else [self._subtree(start, end)]) + proof[::-1]

    def _checked(self, size: int) -> int:
        if not 0 <= size <= len(self):
            raise ValueError(f"size {size} of a tree of {len(self)} entries")
        return size

    def _complete(self, level: int, position: int) -> bytes:
        return bytes(self._levels[level][position * _HASH : (position + 1) * _HASH])

    def _subtree(self, start: int, end: int) -> bytes:
        """Return the root over leaves [start, end), which begin at a multiple of their count's power of two."""
        count = end - start
        if count & (count - 1) == 0:
            level = count.bit_length() - 1
            return self._complete(level, start >> level)
        middle = start + _split(count)
        return _node_hash(self._subtree(start, middle), self._subtree(middle, end))


class RunningRoot:
    """The root of a tree whose entries come one after the other and are not kept: some hashes, however many entries."""

    __slots__ = ("_complete", "_count")

    def __init__(self) -> None:
        # Roots of the complete subtrees from left to right, one for each bit of the count.
        self._complete: list[bytes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, leaf: bytes) -> None:
        """Add the hash of an entry, 32 bytes, as `leaf_hash` returns it."""
        count, found = self._count, leaf
        while count & 1:
            found = _node_hash(self._complete.pop(), found)
            count >>= 1
        self._complete.append(found)
        self._count += 1

    def root(self) -> bytes:
        """Return the root over the entries so far, 32 bytes."""
        if not self._complete:
            return EMPTY_ROOT
        *left, found = self._complete
        for one in reversed(left):
            found = _node_hash(one, found)
        return found


def check_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that a leaf is the entry at ``index`` of the tree with this size and root.

    Parameters
    ----------
    leaf : bytes
        As `leaf_hash` returns it.
    index, size : int
    proof : sequence of bytes
        Hashes from the leaf up.
    root : bytes
        From a verified head.

    Raises
    ------
    VerificationError
        NOT_LOGGED.
    """
    if not 0 <= index < size or not _hashes(proof):
        raise _not_shown("entry", index, size)
    node, last, found = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            raise _not_shown("entry", index, size)
        if node % 2 or node == last:
            found = _node_hash(sibling, found)
            # A node at the right edge without a sibling moves up unchanged.
            while node % 2 == 0 and node:
                node, last = node >> 1, last >> 1
        else:
            found = _node_hash(found, sibling)
        node, last = node >> 1, last >> 1
    if last != 0 or found != root:
        raise _not_shown("entry", index, size)


def check_inclusions(
    leaves: Sequence[bytes], indices: Sequence[int], size: int, proof: Sequence[bytes], root: bytes
) -> None:
    """Check that leaves are entries of the tree with this size and root, by a joint proof.

    Parameters
    ----------
    leaves : sequence of bytes
        As `leaf_hash` returns them.
    indices : sequence of int
        The position of each, strictly ascending.
    size : int
    proof : sequence of bytes
        As `Tree.inclusions` returns it.
    root : bytes
        From a verified head.

    Raises
    ------
    VerificationError
        NOT_LOGGED, also for a proof with a hash too many or too few.
    """
    if len(leaves) != len(indices) or not _ascending(indices, size) or not _hashes(proof):
        raise _not_shown("entries", len(indices), size)
    left = iter(proof)

    def walk(start: int, end: int, low: int, high: int) -> bytes:
        if low == high:
            return next(left)
        if end - start == 1:
            return leaves[low]
        middle = start + _split(end - start)
        between = bisect_left(indices, middle, low, high)
        return _node_hash(walk(start, middle, low, between), walk(middle, end, between, high))

    try:
        found = walk(0, size, 0, len(indices))
    except StopIteration:
        raise _not_shown("entries", len(indices), size) from None
    if found != root or next(left, None) is not None:
        raise _not_shown("entries", len(indices), size)


def check_consistency(
    first: int, first_root: bytes, second: int, second_root: bytes, proof: Sequence[bytes]
) -> None:
    """Check that the tree of ``second`` entries begins with that of ``first``.

    Raises
    ------
    VerificationError
        SPLIT_VIEW.
    """
    path = list(proof)
    if not 0 <= first <= second or not _hashes(path):
        raise _other_log(first, second)
    if first in (0, second):
        if path or (first_root != second_root if first else first_root != EMPTY_ROOT):
            raise _other_log(first, second)
        return
    if first & (first - 1) == 0:
        # The smaller tree is a complete subtree of the larger: its root is the first hash.
        path.insert(0, first_root)
    if not path:
        raise _other_log(first, second)
    node, last = first - 1, second - 1
    while node % 2:
        node, last = node >> 1, last >> 1
    smaller = larger = path[0]
    for sibling in path[1:]:
        if last == 0:
            raise _other_log(first, second)
        if node % 2 or node == last:
            smaller, larger = _node_hash(sibling, smaller), _node_hash(sibling, larger)
            while node % 2 == 0 and node:
                node, last = node >> 1, last >> 1
        else:
            larger = _node_hash(larger, sibling)
        node, last = node >> 1, last >> 1
    if last != 0 or smaller != first_root or larger != second_root:
        raise _other_log(first, second)


def _ascending(indices: Sequence[int], size: int) -> bool:
    """Return whether these are positions in a tree of a size, at least one, each above the one before."""
    if not indices or not 0 <= indices[0] <= indices[-1] < size:
        return False
    return all(one < other for one, other in pairwise(indices))


def _hashes(proof: Sequence[bytes]) -> bool:
    return all(len(one) == _HASH for one in proof)


def _not_shown(what: str, index: int, size: int) -> VerificationError:
    return VerificationError(
        Reason.NOT_LOGGED, f"the proof does not show {what} {index} in the tree of {size}"
    )


def _other_log(first: int, second: int) -> VerificationError:
    return VerificationError(
        Reason.SPLIT_VIEW, f"the tree of {second} entries is not shown to begin with that of {first}"
    )
