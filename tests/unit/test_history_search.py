"""Several items of one user together are its history; what does not depend on the user is not."""

from __future__ import annotations

from collections import Counter
from math import comb

import numpy as np
import pytest

from coterie.privacy.canaries import CanaryKit
from coterie.privacy.history_search import CHANCE, HistorySearch, chance
from coterie.privacy.visibility import Audit
from coterie.systems.visibility import rows_of

ITEMS, HOST, OTHER = 240, "client/host-0", "client/host-1"
RNG = np.random.default_rng(3)
CATALOGUE = CanaryKit(1).item_keys(ITEMS)
OWN = sorted(RNG.choice(ITEMS, 12, replace=False).tolist())
OWNED = CATALOGUE[:80]


@pytest.fixture(scope="module")
def search():
    made = HistorySearch(CATALOGUE, [OWNED])
    made.plant(OWN, {HOST})
    return made


def keys(numbers):
    return " ".join(CATALOGUE[number] for number in numbers).encode()


def test_the_chance_is_that_of_the_hypergeometric_distribution():
    assert chance(10, 4, 3, 0) == pytest.approx(1.0)
    assert chance(10, 4, 3, 3) == pytest.approx(comb(4, 3) / comb(10, 3))
    rng = np.random.default_rng(0)
    drawn = Counter(len(set(rng.choice(20, 6, replace=False)) & set(range(5))) for _ in range(20_000))
    often = sum(count for common, count in drawn.items() if common >= 3) / 20_000
    assert chance(20, 5, 6, 3) == pytest.approx(often, abs=0.01)


def test_one_key_is_public_and_two_of_one_user_are_its_history(search):
    assert search.by_keys(search.keys_in(keys(OWN[:1]))) == []
    (history,) = search.by_keys(search.keys_in(keys(OWN[:2])))
    assert history.holders == {HOST}
    others = [number for number in range(ITEMS) if number not in OWN]
    assert search.by_keys(search.keys_in(keys([OWN[0], *others[:20]]))) == []


def test_keys_are_found_in_hexadecimal_and_base64_as_well(search):
    assert search.keys_in(keys(OWN[:2]).hex().encode()) == set(OWN[:2])


def test_a_public_list_shows_nobodys_items_as_long_as_it_is_whole(search):
    assert search.by_keys(range(ITEMS)) == []
    assert search.by_keys(range(len(OWNED))) == []
    assert search.by_keys([number for number in range(ITEMS) if number != OWN[0]]) != []


def test_the_order_of_a_public_list_counts_where_there_is_one(search):
    assert search.by_public_list(CATALOGUE) == []
    assert search.by_public_list(CATALOGUE[30:70]) == []
    assert search.by_public_list(OWNED) == []
    first = [CATALOGUE[number] for number in OWN]
    assert search.by_public_list([*first, *(key for key in CATALOGUE if key not in first)]) != []


def test_a_list_of_numbers_is_a_history_where_chance_does_not_explain_it(search):
    assert search.by_list(OWN) != []
    assert search.by_list(RNG.permutation(OWN).tolist()) != []
    assert search.by_list(OWN[:9]) != []
    assert search.by_list([*OWN, 7, 90]) != []
    # As few as these are among any dozen numbers.
    assert search.by_list(OWN[:4]) == []
    assert search.by_list(range(ITEMS)) == search.by_list(range(OWN[0], OWN[-1] + 1)) == []


def test_lists_that_do_not_depend_on_the_user_are_no_finding():
    searched = HistorySearch(CATALOGUE)
    rng = np.random.default_rng(9)
    for _ in range(20):
        searched.plant(rng.choice(ITEMS, 12, replace=False).tolist(), {HOST})
    # 20,000 lists for 20 users each: at 10^-12 a list, something is found in 4 of 10,000,000 such tests.
    for _ in range(20_000):
        assert searched.by_list(rng.choice(ITEMS, rng.integers(2, 120), replace=False).tolist()) == []


def test_too_few_items_to_be_told_from_chance_are_refused():
    with pytest.raises(ValueError, match="occur by chance"):
        HistorySearch(CATALOGUE).plant([1, 2, 3], {HOST})
    assert chance(ITEMS, 12, 12, 12) < CHANCE


@pytest.mark.parametrize(
    "page",
    [
        "\n".join(f'coterie_items_total{{item="{number}"}} 1.0' for number in OWN),
        "\n".join(f'coterie_items_total{{item="{CATALOGUE[number]}"}} 1.0' for number in OWN[:2]),
        "\n".join(f'coterie_score{{place="{place}"}} {number}.0' for place, number in enumerate(OWN)),
        "\n".join(
            f'{{"event": "stored", "item": {number}, "of": "{number * 7919:x}"}}' for number in OWN
        ),
        "\n".join(f"stored item {number} at 2026-01-0{at % 9}T10:00:00Z" for at, number in enumerate(OWN)),
        "items " + ",".join(map(str, reversed(OWN))),
        "<tr>" + "".join(f"<td>{number}</td>" for number in OWN),
        "\n".join(f"   {number}," for number in OWN),
        keys(OWN[4:6]).decode(),
    ],
)  # fmt: skip
def test_items_on_a_page_are_found_over_its_lines(search, page):
    assert len(search.by_page(page.encode())) == 1


def test_a_page_is_audited_for_the_operator_who_reads_it(search):
    audit = Audit(CanaryKit(0), rows_of("fedmf", "hosts", "clear"), search)
    assert audit.audit_page(HOST, "log", keys(OWN[:3])) == {"history"}
    assert audit.audit_page(OTHER, "log", keys(OWN[:1])) == set()
    (violation,) = audit.result().violations
    assert (violation.party, violation.kind) == ("operator/operator", "history")
    audit.audit_page(OTHER, "log", keys(OWN[:3]))
    assert {one.party for one in audit.result().violations} == {"operator/operator", OTHER}
