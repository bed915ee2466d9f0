"""The Merkle tree: published vectors of RFC 6962, an independent naive implementation, and forged proofs."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.merkle import (
    EMPTY_ROOT,
    RunningRoot,
    Tree,
    check_consistency,
    check_inclusion,
    check_inclusions,
    leaf_hash,
)
from coterie.crypto.verification import Reason, VerificationError

# The eight entries and roots that implementations of RFC 6962 are tested with.
ENTRIES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    bytes.fromhex(text)
    for text in (
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",  # pragma: allowlist secret
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",  # pragma: allowlist secret
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",  # pragma: allowlist secret
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",  # pragma: allowlist secret
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",  # pragma: allowlist secret
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",  # pragma: allowlist secret
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",  # pragma: allowlist secret
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",  # pragma: allowlist secret
    )
]
# (index from 1, size, proof): published with the roots.
INCLUSIONS = [
    (
        1,
        8,
        (
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",  # pragma: allowlist secret
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",  # pragma: allowlist secret
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",  # pragma: allowlist secret
        ),
    ),
    (
        6,
        8,
        (
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",  # pragma: allowlist secret
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",  # pragma: allowlist secret
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",  # pragma: allowlist secret
        ),
    ),
    (3, 3, ("fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",)),  # pragma: allowlist secret
    (
        2,
        5,
        (
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",  # pragma: allowlist secret
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",  # pragma: allowlist secret
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",  # pragma: allowlist secret
        ),
    ),
]
CONSISTENCIES = [
    (1, 1, ()),
    (
        1,
        8,
        (
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",  # pragma: allowlist secret
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",  # pragma: allowlist secret
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",  # pragma: allowlist secret
        ),
    ),
    (
        6,
        8,
        (
            "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",  # pragma: allowlist secret
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",  # pragma: allowlist secret
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",  # pragma: allowlist secret
        ),
    ),
    (
        2,
        5,
        (
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",  # pragma: allowlist secret
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",  # pragma: allowlist secret
        ),
    ),
]


def tree_of(entries):
    tree = Tree()
    for entry in entries:
        tree.append(leaf_hash(entry))
    return tree


def hashes(texts):
    return [bytes.fromhex(text) for text in texts]


# --- the naive tree: the recursive definitions of RFC 6962, section 2.1, on lists of entries ------------------------


def naive_root(entries):
    if not entries:
        return hashlib.sha256().digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\0" + entries[0]).digest()
    cut = largest_power_below(len(entries))
    return hashlib.sha256(b"\1" + naive_root(entries[:cut]) + naive_root(entries[cut:])).digest()


def largest_power_below(count):
    power = 1
    while 2 * power < count:
        power *= 2
    return power


def naive_inclusion(index, entries):
    if len(entries) == 1:
        return []
    cut = largest_power_below(len(entries))
    if index < cut:
        return [*naive_inclusion(index, entries[:cut]), naive_root(entries[cut:])]
    return [*naive_inclusion(index - cut, entries[cut:]), naive_root(entries[:cut])]


def naive_consistency(first, entries, whole=True):
    if first == len(entries):
        return [] if whole else [naive_root(entries)]
    cut = largest_power_below(len(entries))
    if first <= cut:
        return [*naive_consistency(first, entries[:cut], whole), naive_root(entries[cut:])]
    return [*naive_consistency(first - cut, entries[cut:], False), naive_root(entries[:cut])]


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_roots_are_those_of_the_published_vectors():
    assert Tree().root() == EMPTY_ROOT
    assert hashlib.sha256().digest() == EMPTY_ROOT
    tree = tree_of(ENTRIES)
    assert [tree.root(size) for size in range(1, 9)] == ROOTS
    assert [tree_of(ENTRIES[:size]).root() for size in range(1, 9)] == ROOTS


@pytest.mark.parametrize(("number", "size", "proof"), INCLUSIONS)
def test_inclusion_proofs_are_those_of_the_published_vectors(number, size, proof):
    assert tree_of(ENTRIES).inclusion(number - 1, size) == hashes(proof)
    check_inclusion(leaf_hash(ENTRIES[number - 1]), number - 1, size, hashes(proof), ROOTS[size - 1])


@pytest.mark.parametrize(("first", "second", "proof"), CONSISTENCIES)
def test_consistency_proofs_are_those_of_the_published_vectors(first, second, proof):
    assert tree_of(ENTRIES).consistency(first, second) == hashes(proof)
    check_consistency(first, ROOTS[first - 1], second, ROOTS[second - 1], hashes(proof))


# --- against the naive tree ------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=8), max_size=70))
def test_roots_of_all_sizes_are_the_naive_trees(entries):
    tree = tree_of(entries)
    assert len(tree) == len(entries)
    assert [tree.root(size) for size in range(len(entries) + 1)] == [
        naive_root(entries[:size]) for size in range(len(entries) + 1)
    ]


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=70), st.data())
def test_inclusion_proofs_are_the_naive_trees_and_show_only_what_is_there(entries, data):
    tree = tree_of(entries)
    size = data.draw(st.integers(1, len(entries)))
    index = data.draw(st.integers(0, size - 1))
    proof = tree.inclusion(index, size)
    assert proof == naive_inclusion(index, entries[:size])
    leaf, root = leaf_hash(entries[index]), naive_root(entries[:size])
    check_inclusion(leaf, index, size, proof, root)
    for case in (
        (leaf_hash(b"another entry"), index, size, proof, root),
        (leaf, index, size, proof, leaf_hash(b"another root")),
        (leaf, index, size, [*proof, leaf], root),
        (leaf, index, size, proof[:-1] if proof else [leaf], root),
        (leaf, index, size, [one[:31] for one in proof] or [b""], root),
        (leaf, size, size, proof, root),
        (leaf, -1, size, proof, root),
        (leaf, 0, 0, proof, root),
    ):
        with pytest.raises(VerificationError) as failed:
            check_inclusion(*case)
        assert failed.value.reason == Reason.NOT_LOGGED


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=70), st.data())
def test_consistency_proofs_are_the_naive_trees_and_show_only_what_is_so(entries, data):
    tree = tree_of(entries)
    second = data.draw(st.integers(1, len(entries)))
    first = data.draw(st.integers(1, second))
    proof = tree.consistency(first, second)
    assert proof == naive_consistency(first, entries[:second])
    before, after = naive_root(entries[:first]), naive_root(entries[:second])
    check_consistency(first, before, second, after, proof)
    other = naive_root([*entries[: first - 1], b"another entry"])
    for case in (
        (first, other, second, after, proof),
        (first, before, second, other, proof),
        (first, before, second, after, [*proof, before]),
        (first, before, second, after, proof[:-1] if proof else [before]),
        (first, before, second, after, [one[:31] for one in proof] or [b""]),
        (second + 1, before, second, after, proof),
        (-1, before, second, after, proof),
    ):
        with pytest.raises(VerificationError) as failed:
            check_consistency(*case)
        assert failed.value.reason == Reason.SPLIT_VIEW


def test_every_tree_begins_with_the_empty_one():
    assert tree_of(ENTRIES).consistency(0, 8) == []
    check_consistency(0, EMPTY_ROOT, 8, ROOTS[7], [])
    for case in ((0, ROOTS[0], 8, ROOTS[7], []), (0, EMPTY_ROOT, 8, ROOTS[7], [ROOTS[0]])):
        with pytest.raises(VerificationError):
            check_consistency(*case)


def test_proofs_of_what_a_tree_does_not_have_are_refused():
    tree = tree_of(ENTRIES)
    for wrong in (
        lambda: tree.root(9),
        lambda: tree.root(-1),
        lambda: tree.inclusion(0, 9),
        lambda: tree.inclusion(3, 3),
        lambda: tree.consistency(3, 9),
        lambda: tree.consistency(4, 3),
        lambda: tree.append(bytes(31)),
    ):
        with pytest.raises(ValueError, match=r"tree|hash"):
            wrong()
    assert len(tree) == 8


# --- many entries at once ----------------------------------------------------------------------------------------


@st.composite
def some_of_a_tree(draw):
    size = draw(st.integers(1, 70))
    indices = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    tree = Tree()
    leaves = [leaf_hash(number.to_bytes(2)) for number in range(size + draw(st.integers(0, 5)))]
    for leaf in leaves:
        tree.append(leaf)
    return tree, [leaves[at] for at in indices], indices, size


def refused(leaves, indices, size, proof, root):
    with pytest.raises(VerificationError) as caught:
        check_inclusions(leaves, indices, size, proof, root)
    return caught.value.reason == Reason.NOT_LOGGED


@given(some_of_a_tree())
def test_a_joint_proof_shows_entries_wherever_they_stand(case):
    tree, leaves, indices, size = case
    check_inclusions(leaves, indices, size, tree.inclusions(indices, size), tree.root(size))


@given(some_of_a_tree())
def test_a_joint_proof_of_one_entry_has_the_hashes_of_its_own_proof(case):
    tree, _, indices, size = case
    alone = tree.inclusions(indices[:1], size)
    assert sorted(alone) == sorted(tree.inclusion(indices[0], size))


@given(some_of_a_tree(), st.data())
def test_a_joint_proof_with_one_thing_altered_shows_nothing(case, data):
    tree, leaves, indices, size = case
    root, proof = tree.root(size), tree.inclusions(indices, size)
    forged = [leaf_hash(b"forged") if at == 0 else leaf for at, leaf in enumerate(leaves)]
    assert refused(forged, indices, size, proof, root)
    assert refused(leaves, indices, size, [*proof, bytes(32)], root)
    assert refused(leaves[1:], indices[1:], size, proof, root)
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        assert refused(leaves, indices, size, proof[:at] + proof[at + 1 :], root)
        assert refused(leaves, indices, size, [*proof[:at], bytes(32), *proof[at + 1 :]], root)
        assert refused(leaves, indices, size, [*proof[:at], b"short", *proof[at + 1 :]], root)


@pytest.mark.parametrize("indices", [[], [1, 1], [2, 1], [-1], [8], [0, 8]])
def test_a_joint_proof_is_of_ascending_positions_of_the_tree(indices):
    tree = Tree()
    for entry in ENTRIES:
        tree.append(leaf_hash(entry))
    with pytest.raises(ValueError, match="in ascending order"):
        tree.inclusions(indices, 8)
    assert refused([bytes(32)] * len(indices), indices, 8, [], tree.root())


def test_a_joint_proof_of_neighbours_is_short():
    tree = Tree()
    for number in range(5000):
        tree.append(leaf_hash(number.to_bytes(2)))
    assert len(tree.inclusions(range(1234, 2234), 5000)) <= 2 * 13


@given(st.integers(0, 70))
def test_a_root_without_its_entries_is_that_of_the_tree(size):
    tree, running = Tree(), RunningRoot()
    for number in range(size):
        tree.append(leaf_hash(number.to_bytes(2)))
        running.append(leaf_hash(number.to_bytes(2)))
    assert (running.root(), len(running)) == (tree.root(), size)
