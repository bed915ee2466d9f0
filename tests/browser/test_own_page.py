"""A person's own page in a real browser, at an agent that takes part in a real federation."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

from .looking import CHROMIUM, WAIT_S
from .people import People, coterie

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
    pytest.mark.xdist_group("own page"),
]
SETTINGS = """
name = "people"
system = "fpl"
secure_sum = "masked"
seeds = [0]
reference = false
[rounds]
cohort = 4
group = 4
min_cohort = 3
min_sum = 3
passes = 4
evaluate_every = 2
[federation]
hosts = 3
"""


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[People]:
    made = People(tmp_path_factory.mktemp("people"), SETTINGS)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def home(people: People, browser: Any) -> Iterator[Any]:
    """Yield the person's browser on the page, after the run; the tests of the module share it."""
    from .looking import Looked

    one = Looked(browser)
    one.page.goto(people.link)
    one.state("open")
    one.until("now", "Waiting for the run")
    one.picture("own-1-waiting")
    assert one.violations() == []
    coterie("operate", "--config", str(people.folder / "operator" / "config.toml"))
    one.until("now", "The run has ended")
    yield one
    one.context.close()


def test_the_page_shows_the_receipt_that_the_command_prints(people: People, home: Any) -> None:
    home.until("receipt", "model update")
    home.page.wait_for_timeout(1500)
    told = people.asked("receipt")
    rows = [row.inner_text().split("\t") for row in home.page.locator("#receipt tbody tr").all()]
    assert [row[:3] for row in rows] == [
        [one["recipient"], one["kind"], one["protection"]] for one in told["disclosures"]
    ]
    assert [int(row[3].replace(",", "")) for row in rows] == [one["count"] for one in told["disclosures"]]
    # Every byte: the page itself rounds, its stream does not.
    streamed = home.page.evaluate(
        """() => new Promise(done => {
            const source = new EventSource('/events');
            source.onmessage = event => { source.close(); done(JSON.parse(event.data)); };
        })"""
    )
    assert streamed["receipt"] == {"sent": told["disclosures"], "declined": told["declined"]}
    assert any("masked" in one["protection"] for one in told["disclosures"])
    # A run that is over has nothing to pause or to leave, whoever asks.
    assert home.text("part-words") == "The run has ended: there is nothing left to take part in."
    assert not home.page.is_visible("#part-choices")
    for path, body in (("choose", {"paused": True}), ("leave", {})):
        status, said = home.page.evaluate(
            """async ([path, body]) => {
                const headers = {'content-type': 'application/json'};
                const answer = await fetch(`/own/${path}`, {method: 'POST', headers, body: JSON.stringify(body)});
                return [answer.status, await answer.json()];
            }""",
            [path, body],
        )
        assert (status, said["error"]) == (409, "the run has ended: there is no round left to stay out of")
    assert not (people.folder / people.host / "state" / "stance.json").exists()
    assert home.violations() == []
    home.picture("own-2-ended")


def test_the_page_shows_consent_beside_the_run(people: People, home: Any) -> None:
    consent = home.text("consent")
    assert "Smallest cohort\t3 or more\t3" in consent
    assert "none: sums are exact" in consent
    assert f"Device of {people.person}" in home.text("title")
    assert "masked" in home.text("now-more")


def test_a_preference_is_changed_and_the_service_has_it(people: People, home: Any) -> None:
    home.page.fill("#preference-pi", "0.25")
    home.page.get_by_role("button", name="Set pi").click()
    home.until("preferences-said", "pi is 0.25")
    (pi,) = people.asked("preferences")["preferences"]
    assert (pi["name"], pi["value"]) == ("pi", 0.25)
    home.until("preferences", "yours is 0.25")
    home.page.fill("#preference-pi", "7")
    home.page.get_by_role("button", name="Set pi").click()
    home.until("preferences-said", "Expected a number from")
    answer = home.page.evaluate(
        """async () => {
            const headers = {'content-type': 'application/json'};
            const body = JSON.stringify({name: 'pi', value: 7});
            const answer = await fetch('/own/preferences', {method: 'POST', headers, body});
            return [answer.status, await answer.json()];
        }"""
    )
    assert answer[0] == 409
    assert "range" in answer[1]["error"]
    home.page.get_by_role("button", name="Leave it to the run").click()
    home.until("preferences", "the run's plan decides")
    assert people.asked("preferences")["preferences"][0]["value"] is None


def test_recommendations_name_an_own_item_and_hostile_titles_are_only_text(people: People, home: Any) -> None:
    home.page.click("#recommend")
    home.until("items", "because you have")
    home.until("recommend-said", "cosine of the items' vectors")
    shown = home.text("items")
    assert "<script>" in shown
    assert "\u202e" not in shown
    rows = (people.folder / people.host / "histories.csv").read_text().splitlines()[1:]
    own = {row.split(",")[1] for row in rows if row.split(",")[4] == "0"}
    for item in home.page.locator("#items li").all():
        title, _, reason = item.inner_text().partition(" because you have ")
        assert title.split()[-1] not in own
        if reason:
            assert reason.split()[-2] in own
    assert home.page.title() != "run"
    assert home.page.locator("img, body script").count() == 0
    assert home.violations() == []
    home.picture("own-3-recommended")


def test_own_history_is_previewed_before_it_is_kept(people: People, home: Any) -> None:
    rows = (people.folder / people.host / "histories.csv").read_text().splitlines()[1:]
    held = [row.split(",")[1] for row in rows if row.split(",")[4] != "3"]
    fresh = [item for item in (f"film-{n:02}" for n in range(24)) if item not in held][:2]
    before = people.asked("receipt")

    def given(text: str) -> None:
        content = {"name": "mine.csv", "mimeType": "text/csv", "buffer": text.encode()}
        home.page.set_input_files("#file", content)
        home.page.click("#preview")

    given("item,rating\nfilm-00,4\nfilm-01,four\n")
    home.until("import-said", "line 3")
    home.picture("own-4-wrong-line")
    given(f"item\n{fresh[0]}\n{fresh[1]}\n{held[0]}\nno such film\n")
    home.until("import-said", "2 new items; 1 that you have already; 1 that this run does not know")
    assert "Adding sends nothing" in home.text("import-words")
    home.page.click("#drop")
    home.until("import-said", "Nothing was kept")
    given(f"item\n{fresh[0]}\n{fresh[1]}\n")
    home.until("preview-rows", fresh[1])
    assert home.violations() == []
    home.picture("own-5-preview")
    home.page.click("#keep")
    home.until("import-said", "2 items are in your history now")
    given(f"item\n{fresh[0]}\n{fresh[1]}\n")
    home.until("import-said", "0 new items; 2 that you have already")
    assert people.asked("receipt") == before


def test_other_sites_names_and_links_get_nothing(people: People, home: Any, look: Any) -> None:
    address = people.link.partition("#")[0]
    port = address.rpartition(":")[2].strip("/")
    used = look()
    used.page.goto(people.link)
    used.state("outside")
    assert "used already" in used.text("entry-reason")
    assert used.violations() == []
    used.picture("own-6-closed")
    wrong = look()
    wrong.page.goto(address + "#" + "x" * 43)
    wrong.state("outside")
    assert "not one of this page" in wrong.text("entry-reason")
    unknown = wrong.page.evaluate("fetch('/own/recommend', {method: 'POST'}).then(answer => answer.status)")
    assert unknown == 401
    forged = look()
    answer = forged.page.goto(f"http://evil.example:{port}/")
    assert answer.status == 421
    # The session's cookie goes along to any port of this machine: the origin is what is refused.
    other = home.context.new_page()
    other.goto(f"http://localhost:{port}/")
    tried = other.evaluate(
        """async address => {
            const headers = {'content-type': 'text/plain'}, body = '{"name": "pi", "value": 0.9}';
            const sent = {method: 'POST', mode: 'no-cors', credentials: 'include', headers, body};
            await fetch(address + 'own/preferences', sent).catch(() => 0);
            const asked = {method: 'POST', credentials: 'include', body, headers: {'content-type': 'application/json'}};
            return fetch(address + 'own/preferences', asked).then(answer => answer.status, () => 'refused');
        }""",
        address,
    )
    other.close()
    assert tried == "refused"
    # Even with the session's cookie the origin decides; and a request has to say which one it has.
    change = {"name": "pi", "value": 0.9}
    asking = home.context.request
    for origin, status in (("http://evil.example", 403), (f"http://localhost:{port}", 403), (None, 403)):
        headers = {"origin": origin} if origin else {}
        assert asking.post(f"{address}own/preferences", data=change, headers=headers).status == status
    own = {"origin": address.rstrip("/")}
    assert asking.post(f"{address}own/preferences", data={"name": "pi"}, headers=own).status == 200
    assert people.asked("preferences")["preferences"][0]["value"] is None
    assert home.page.evaluate("fetch('/session').then(answer => answer.json())")["inside"]


def test_the_page_is_narrow_and_dark_and_asks_nobody_else(people: People, home: Any, look: Any) -> None:
    home.page.click("#share")
    narrow = look(390, "dark")
    narrow.page.goto(home.page.locator("#link code").inner_text())
    narrow.state("open")
    narrow.until("receipt", "model update")
    narrow.page.click("#recommend")
    narrow.until("items", "because you have")
    assert narrow.violations() == []
    narrow.picture("own-7-390-dark")
    widths = narrow.page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert widths[0] <= widths[1]
    assert narrow.said == []
    start = people.link.partition("#")[0]
    assert {url.startswith(start) for url in narrow.asked} == {True}


def test_without_the_server_an_agent_that_starts_again_still_shows_the_receipt(
    people: People, look: Any
) -> None:
    before = people.asked("receipt")
    people.agent.send_signal(signal.SIGINT)
    assert people.agent.wait(WAIT_S) == 0
    people.children["cos"].kill()
    people.agent, people.link = people.started()
    one = look()
    one.page.goto(people.link)
    one.state("open")
    one.until("receipt", "model update")
    rows = [row.inner_text().split("\t") for row in one.page.locator("#receipt tbody tr").all()]
    assert [row[:2] for row in rows] == [
        [entry["recipient"], entry["kind"]] for entry in before["disclosures"]
    ]
    one.until("now-more", "the run's server does not answer")
    one.until("consent", "not told yet")
    assert "nor whether an experiment counted users" in one.text("unknown")
    assert one.violations() == []
    one.picture("own-8-server-away")
