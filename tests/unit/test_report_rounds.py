"""The report of a run in rounds."""

from __future__ import annotations

from typing import Any

from coterie.telemetry.report import Report
from coterie.telemetry.report_facts import headline, leading_metric, rows, run_label
from coterie.telemetry.report_html import render
from coterie.telemetry.report_rounds import protection_lines, rounds_lines, rounds_of, rounds_section
from coterie.telemetry.report_sections import sections


def one(number: int, purpose: str = "train", **given: Any) -> dict[str, Any]:
    return {
        "round": number,
        "purpose": purpose,
        "pass": 0,
        "users": 100,
        "members": 4,
        "summed": 100,
        "dropped": 0,
        "refused": 0,
        "liars": 0,
        "reason": "",
        "seconds": {"submit": 2.0, "unmask sum": 1.0},
        "bytes_in": 4000,
        "version": number,
        **given,
    }


def report(**given: Any) -> Report:
    made = {
        "system": "fedncf",
        "label": "FedNeuMF",
        "form": "hosts",
        "secure_sum": "masked",
        "settings": {"fedncf": {"model": "neumf"}},
        "dataset": {"name": "a set", "users": 200},
        "metrics": {
            "hit_ratio@10": {"mean": 0.6, "std": None},
            "hit_ratio_all@10": {"mean": 0.2, "std": None},
            "validation_hit_ratio@10": {"mean": 0.7, "std": None},
        },
        "history": [
            {"epoch": n, "version": 2 * n, "time_s": n, "owners": None, "metrics": {"hit_ratio@10": 0.1 * n}}
            for n in range(3)
        ],
        "chosen": {"version": 4, "epoch": 2},
        "rounds": [
            one(1, "supports", bytes_in=800),
            one(2, dropped=1, summed=75, refused=2),
            one(3, summed=0, reason="too few submitted", bytes_in=1000, dropped=3, liars=1),
            one(4, "evaluate", bytes_in=200),
        ],
        "abandoned": 1,
        "protection": {
            "sum": "masked",
            "parties": "hosts",
            "says": "Sums only.",
            "warnings": ["Take <care>."],
            "devices": {"count": 4, "curious": 1, "lost": 2},
        },
        **given,
    }
    return Report.model_validate(made)


def test_rounds_are_added_up() -> None:
    found = rounds_of(report())
    assert found is not None
    assert found.by_purpose == {"supports": 1, "train": 2, "evaluate": 1}
    assert found.seconds == {"submit": 8.0, "unmask sum": 4.0}
    assert found.abandoned == {"too few submitted": 1}
    assert (found.members, found.dropped, found.refused, found.liars) == (16, 4, 2, 1)
    # Of the rounds of training that were not abandoned: 4,000 bytes of four members.
    assert found.per_member == 1000
    assert found.per_user == 30


def test_a_run_without_rounds_says_nothing_of_them() -> None:
    assert rounds_of(Report(system="drift")) is None
    assert rounds_lines(Report()) == protection_lines(Report()) == []
    assert not rounds_section(Report())


def test_a_run_in_one_process_sent_nothing() -> None:
    found = rounds_of(report(rounds=[one(1, bytes_in=None)]))
    assert found is not None
    assert found.per_member is found.per_user is None
    assert "Sent" not in dict(rounds_lines(report(rounds=[one(1, bytes_in=None)])))


def test_the_terminal_names_the_sum_what_it_protects_and_what_went_wrong() -> None:
    said = dict(protection_lines(report())) | dict(rounds_lines(report()))
    assert said["Secure sum"] == "masked. Sums only."
    assert said["  devices"] == "4; curious tolerated: 1; lost tolerated: 2"
    assert said["  note"] == "Take <care>."
    assert said["Version that counts"] == "4, after 2 passes, by validation items"
    assert said["Rounds"].startswith(
        "1 supports, 2 train, 1 evaluate; 1 abandoned, 4 members dropped out (25"
    )
    assert said["  abandoned"] == "1: too few submitted"
    assert said["Time of the rounds"].startswith("12.0 s: submit 66.7%")


def test_the_page_has_a_section_of_rounds_after_that_of_learning() -> None:
    names = [found.name for found in sections(report())]
    assert names[:2] == ["learning", "rounds"]
    page = render(report())
    assert "Sums of the rounds" in page
    assert "Take &lt;care&gt;." in page
    assert "too few submitted" in page
    assert "FedNeuMF on a set" in page


def test_with_one_held_out_item_bare_keys_are_among_sampled_items() -> None:
    populations = {column.key: column.population for column in headline(report())}
    assert populations == {"hit_ratio@10": "sampled items", "hit_ratio_all@10": "all unseen items"}
    leading = leading_metric(report())
    assert leading is not None
    assert leading.key == "hit_ratio@10"
    assert [row.label for row in rows(report(), [leading])] == ["FedNeuMF"]


def test_without_a_ranking_of_its_own_for_all_items_bare_keys_are_that_ranking() -> None:
    drift = Report.model_validate(
        {
            "system": "drift",
            "label": "DRIFT",
            "metrics": {"ndcg@10": {"mean": 0.1}, "map@10": {"mean": 0.2}},
        }
    )
    assert {column.population for column in headline(drift)} == {"all unseen items"}
    assert run_label(drift) == "DRIFT"


def test_places_that_were_dropped_are_said_where_there_were_any() -> None:
    made = report(rounds=[one(1, dropped_places=2), one(2, dropped_places=3), one(3)])
    assert dict(rounds_lines(made))["Rounds"].endswith("5 places dropped")
    assert [fact.value for fact in rounds_section(made).facts if fact.name == "Places dropped"] == ["5"]
    assert "places dropped" not in dict(rounds_lines(report()))["Rounds"]


def test_contributions_that_a_rule_left_out_are_said_where_there_were_any() -> None:
    made = report(rounds=[one(1, left_out=2), one(2, left_out=4)])
    assert dict(rounds_lines(made))["Rounds"].endswith("6 contributions left out by the rule")
    assert [fact.value for fact in rounds_section(made).facts if fact.name == "Contributions left out"] == [
        "6"
    ]
    assert "left out" not in dict(rounds_lines(report()))["Rounds"]


def test_contributions_that_were_withdrawn_are_said_with_the_reasons() -> None:
    made = report(
        rounds=[
            one(1, left_out=2, withdrawn=["2 users: why"]),
            one(2, left_out=2, withdrawn=["2 users: why"]),
        ]
    )
    lines = rounds_lines(made)
    assert dict(lines)["Rounds"].endswith("4 contributions withdrawn, because noise was not taken out")
    assert ("  withdrawn", "2: 2 users: why") in lines
    (table,) = [
        each for each in rounds_section(made).tables if each.caption == "Rounds with contributions withdrawn"
    ]
    assert table.rows == [["2 users: why", "2"]]
    assert all(name != "  withdrawn" for name, _ in rounds_lines(report()))


def test_rounds_without_what_owners_know_are_counted_by_their_names() -> None:
    rounds = [
        one(1),
        one(2, silent_owners=["films"]),
        one(3, silent_owners=["films"]),
        one(4, silent_owners=[]),
    ]
    made = report(rounds=rounds)
    assert ("  without item features", "2: films said nothing in time") in rounds_lines(made)
    page = rounds_section(made)
    (table,) = [each for each in page.tables if each.caption == "Rounds without item features"]
    assert table.rows == [["films", "2"]]
    assert all(name != "  without item features" for name, _ in rounds_lines(report()))


def test_users_who_came_later_are_counted_by_the_pass_from_which_they_took_part() -> None:
    waves = [{"from_pass": 3, "users": 20}, {"from_pass": 1200, "users": 1500}]
    found = report(waves=waves)
    assert (
        dict(rounds_lines(found))["Came later"] == "1,520 users: 20 from pass 3 on, 1,500 from pass 1,200 on"
    )
    (table,) = [one for one in rounds_section(found).tables if one.caption == "Users who came later"]
    assert table.rows == [["3", "20"], ["1,200", "1,500"]]
    assert "Came later" not in dict(rounds_lines(report()))
