"""The report's part on services of the third party: lines in the terminal, a section of the page, hosts over limits."""

from coterie.telemetry.quantities import ABSENT
from coterie.telemetry.report import Report
from coterie.telemetry.report_html import render
from coterie.telemetry.report_services import services_lines, services_section

ASKED = {
    "expansion": {
        "counters": {
            "epoch": 1,
            "uploads": 943,
            "tags": 2306,
            "served_tags": 1800,
            "questions": 1886,
            "neighbours": 90_000,
        },
        "refused": {"TOO_LARGE": 7, "UNKNOWN_ITEM": 2},
        "hosts": {
            "client/host-0": {"answered": {"publish": 500, "ask": 1000}, "refused": {}},
            "client/host-1": {
                "answered": {"publish": 443, "ask": 886},
                "refused": {"TOO_LARGE": {"ask": 7}, "UNKNOWN_ITEM": {"ask": 2}, "NOT_READY": {"publish": 1}},
            },
        },
    },
    "latents": {
        "counters": {"epoch": 1, "key_users": 755, "combinations": 64},
        "hosts": {"client/host-0": {"answered": {"publish": 755}, "refused": {"OVERLOADED": {"publish": 3}}}},
    },
}


def test_the_terminal_has_counters_and_names_the_hosts_that_asked_for_too_much():
    assert services_lines(Report.read({"third_party": ASKED})) == [
        ("Graph expansion", "943 uploads, 1,886 questions answered, 90,000 neighbours handed out"),
        ("  refused over a limit", "client/host-1, questions: 7"),
        ("Meta-latents", "755 key users, 64 combinations"),
        ("  refused over a limit", "client/host-0, publications: 3"),
    ]


def test_the_page_lists_the_requests_of_each_host():
    found = services_section(Report.read({"third_party": ASKED}))
    requests, refusals, latents = found.tables
    assert [row[0] for row in requests.rows] == ["client/host-0", "client/host-1"]
    assert requests.rows[0][1:] == ["500", "1,000", "0", ABSENT, ABSENT]
    assert requests.rows[1][1:4] == ["443", "886", "0"]
    assert requests.rows[1][4] == (
        "TOO_LARGE (questions: 7); UNKNOWN_ITEM (questions: 2); NOT_READY (publications: 1)"
    )
    assert requests.rows[1][5] == "questions: 7"
    assert refusals.rows == [["TOO_LARGE", "7"], ["UNKNOWN_ITEM", "2"]]
    assert latents.rows == [
        ["client/host-0", "755", "0", "0", "OVERLOADED (publications: 3)", "publications: 3"]
    ]
    assert {fact.note for fact in found.facts} == {"graph expansion", "meta-latents"}
    assert "Services of the third party" in render(Report.read({"third_party": ASKED}))


def test_a_run_that_asked_nothing_has_neither():
    assert not services_section(Report.read({}))
    assert services_lines(Report.read({})) == []


def test_without_an_answer_of_the_third_party_what_the_cos_counted_is_still_shown():
    hosts = {"expansion": {"hosts": ASKED["expansion"]["hosts"]}}
    report = Report.read({"third_party": hosts})
    assert services_lines(report)[0] == ("Graph expansion", "the third party did not answer in the end")
    assert len(services_section(report).tables) == 1
