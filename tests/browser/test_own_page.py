"""A person's own page in a real browser, at an agent that takes part in a real federation."""

import json
import random
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

from coterie.config.run import RunSettings
from coterie.launch.bootstrap import bootstrap
from coterie.launch.children import Child, free_port

from .looking import CHROMIUM, WAIT_S

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
    pytest.mark.xdist_group("own page"),
]
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202egpj.exe"
USERS = ("ada", "bob", "cyd", "dee")
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


def written(path: Path) -> Path:
    """Write ratings of four users, who all have different items."""
    draw = random.Random(3)
    rows = ["user,item,rating,timestamp"]
    for user in USERS:
        rows += [
            f"{user},film-{item:02},{draw.randint(3, 5)},{1000 + at}"
            for at, item in enumerate(draw.sample(range(24), 12))
        ]
    path.write_text("\n".join(rows) + "\n")
    return path


def coterie(*arguments: str, wait: bool = True) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if wait:
        assert process.wait(WAIT_S) == 0
    return process


def printed(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.read())["result"]


class People:
    """A federation that stands: two hosts as services, and the one of a single person as an agent."""

    def __init__(self, folder: Path, passes: int = 4) -> None:
        self.folder = folder
        tree = tomllib.loads(SETTINGS)
        tree["data"] = {"path": str(written(folder / "ratings.csv"))}
        tree["rounds"] |= {"passes": passes, "patience": 0}
        settings = RunSettings.model_validate(tree)
        names = ("thirdparty", "enrol", "cos", "owner-0", "host-0", "host-1", "host-2")
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        bootstrap(settings, folder, "people", addresses=self.addresses)
        self.host = next(name for name in ("host-0", "host-1", "host-2") if len(self.users(name)) == 1)
        (self.person,) = self.users(self.host)
        roles = {"thirdparty": "thirdparty", "cos": "cos", "owner": "data-owner", "host": "client"}
        self.children: dict[str, Child] = {}
        for name in (one for one in names if one not in ("enrol", self.host)):
            config = tomllib.loads((folder / name / "config.toml").read_text())
            more = [f"enrol_listen={self.addresses['enrol']}"] if name == "thirdparty" else []
            child = Child(roles[name.partition("-")[0]], config["name"], folder / name)
            child.start(f"listen={self.addresses[name]}", f"metrics=127.0.0.1:{free_port()}", *more)
            self.children[name] = child
        # As `coterie run` lays a run out, for its commands.
        (folder / "operator" / "tls").symlink_to(folder / "operator" / "state" / "tls")
        config = folder / self.host / "config.toml"
        listen = tomllib.loads(config.read_text())["listen"]
        config.write_text(config.read_text().replace(listen, self.addresses[self.host]))
        titles = folder / "titles.csv"
        shown = {item: f"{HOSTILE} {item}" for item in (f"film-{n:02}" for n in range(24))}
        quoted = (f'{item},"{title.replace(chr(34), chr(34) * 2)}"' for item, title in shown.items())
        titles.write_text("\n".join(["item,title", *quoted]) + "\n")
        self.agent, self.link = self.started("--titles", str(titles))

    def users(self, host: str) -> set[str]:
        rows = (self.folder / host / "histories.csv").read_text().splitlines()[1:]
        return {row.partition(",")[0] for row in rows}

    def started(self, *more: str) -> tuple["subprocess.Popen[str]", str]:
        """Start the person's agent and return it with the link that it prints."""
        config = ("--config", str(self.folder / self.host / "config.toml"))
        process = coterie("agent", *config, f"--set=metrics=127.0.0.1:{free_port()}", *more, wait=False)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("own page: http://127.0.0.1:"), line
        return process, line.partition(": ")[2].strip()

    def asked(self, command: str) -> Any:
        """Return what a command says of the person, by the run's operator."""
        given = ("--run", str(self.folder), "--user", self.person, "--json")
        return printed(coterie(command, *given))

    def stop(self) -> None:
        if self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        for child in reversed(self.children.values()):
            child.kill()


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[People]:
    made = People(tmp_path_factory.mktemp("people"))
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


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[tuple[People, Any]]:
    """Yield another federation, whose run goes on longer than any test, with the person's browser on the page."""
    from .looking import Looked

    people = People(tmp_path_factory.mktemp("going"), passes=100_000)
    operating = None
    try:
        one = Looked(browser)
        one.page.goto(people.link)
        one.state("open")
        config = str(people.folder / "operator" / "config.toml")
        operating = coterie("operate", "--config", config, wait=False)
        one.until("now", "This device takes part in the run")
        one.until("receipt", "model update")
        yield people, one
        one.context.close()
    finally:
        if operating is not None:
            operating.kill()
            operating.wait()
        people.stop()


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


def stance(people: People) -> Any:
    return json.loads((people.folder / people.host / "state" / "stance.json").read_text())


def test_after_the_run_nothing_is_offered_that_would_change_nothing(people: People, home: Any) -> None:
    home.until("part-words", "The run has ended: there is no round left to stay out of.")
    for name in ("pause", "limit", "leave-run", "leaving"):
        assert not home.page.is_visible(f"#{name}"), name
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


def test_a_person_pauses_goes_on_and_limits_its_rounds(going: tuple[People, Any]) -> None:
    people, home = going
    home.until("part-words", "every round that your consent bears")
    home.page.click("#pause")
    home.until("part-words", "You have paused")
    assert stance(people)["paused"] is True
    home.until("pause", "Go on")
    home.picture("own-4-paused")
    assert home.violations() == []
    home.page.click("#pause")
    home.until("part-words", "every round that your consent bears")
    assert stance(people)["paused"] is False
    home.page.fill("#rounds-per-day", "12")
    home.page.click("#limit")
    home.until("part-words", "12 rounds a day at most")
    assert stance(people)["rounds_per_day"] == 12
    home.page.fill("#rounds-per-day", "2.5")
    home.page.click("#limit")
    home.until("part-said", "Expected a whole number")
    home.page.fill("#rounds-per-day", "0")
    home.page.click("#limit")
    home.until("part-said", "No limit of your own")
    for body in ({"paused": 1}, {"rounds_per_day": -1}, {"rounds_per_day": True}, {"left": True}, {"x": 1}):
        status = home.page.evaluate(
            """async (body) => {
                const headers = {'content-type': 'application/json'};
                const answer = await fetch('/own/choose', {method: 'POST', headers, body: JSON.stringify(body)});
                return answer.status;
            }""",
            body,
        )
        assert status == 409
    assert stance(people) == {"paused": False, "left": False, "rounds_per_day": 0, "forget": False}


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
    assert home.page.locator("img, script:not([src])").count() == 0
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


def test_leaving_takes_two_steps_and_says_what_it_does_not_undo(going: tuple[People, Any]) -> None:
    people, home = going
    home.page.click("#leave-run")
    home.until("leaving", "Leave for good?")
    assert "takes part in no sum, for good" in home.text("undone")
    assert "nobody can take one device's part out of a sum" in home.text("kept")
    assert str(people.folder / people.host / "state") in home.text("local")
    assert home.violations() == []
    home.picture("own-8-leaving")
    home.page.click("#leave-no")
    home.until("part-said", "Nothing was changed")
    assert stance(people)["left"] is False
    # The second step without the first, and with another question's token.
    for token in ("", "x" * 22):
        status = home.page.evaluate(
            """async (token) => {
                const headers = {'content-type': 'application/json'};
                const answer = await fetch('/own/leave', {method: 'POST', headers, body: JSON.stringify({token})});
                return answer.status;
            }""",
            token,
        )
        assert status == 409
    assert stance(people)["left"] is False
    home.page.click("#leave-run")
    home.until("leaving", "Leave for good?")
    home.page.click("#leave-yes")
    home.until("part-words", "You have left this run")
    home.until("part-said", "Nothing was published at the third party")
    assert stance(people)["left"] is True
    assert stance(people)["forget"] is True
    assert not home.page.is_visible("#part-choices")
    assert home.violations() == []
    home.picture("own-9-left")


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
