"""A person's own page: what it says of consent and import, how alike items are, and who may have an agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import invoke
from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError, PeerError, StoreError
from coterie.launch.agent import _AgentProcess
from coterie.rounds.consent import Consent
from coterie.rounds.stance import Stance
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.fpl.settings import FplSettings
from coterie.systems.registry import server_side, system_named
from coterie.web.own_facts import choices, consent_rows, cost, import_words, other_preferences
from coterie.web.own_page import read_titles
from coterie.wire.v1.orchestrator_pb2 import PrivacyPlan, RoundsPlan, RunPlan

SPEC = {"users": 60, "items": 40, "interactions": 900, "genres": 4}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = invoke(arguments)
    return status, capsys.readouterr().err


def client(folder: Path, users: tuple[str, ...]) -> str:
    """Write the configuration of a client host with these users, and return its path."""
    rows = [f"{user},film,1,1000,0" for user in users]
    histories = folder / "histories.csv"
    histories.write_text("\n".join(["user,item,positive,time,part", *rows]) + "\n")
    histories.chmod(0o600)
    peer = 'address = "127.0.0.1:1", name = "{}"'
    config = folder / "client.toml"
    config.write_text(
        f'name = "own"\nstate = "{folder}/state"\nlisten = "127.0.0.1:0"\nrun = "a-run"\n'
        f'operator_keys = ["{"ab" * 32}"]\nhistories = "{histories}"\n'
        f"cos = {{{peer.format('cos')}}}\nthirdparty = {{{peer.format('directory')}}}\n"
    )
    return str(config)


def test_a_host_of_several_users_is_no_persons_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = refused(capsys, "agent", "--config", client(tmp_path, ("ada", "bob")))
    assert status == ConfigError.exit_code
    assert "2 users; expected one" in said
    assert "coterie serve client" in said
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("listen", "words"), [("0.0.0.0:8020", "loopback only"), ("somewhere", "expected HOST:PORT")]
)
def test_the_page_is_on_loopback_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listen: str, words: str
) -> None:
    status, said = refused(capsys, "agent", "--config", client(tmp_path, ("ada",)), "--page-listen", listen)
    assert status == ConfigError.exit_code
    assert words in said


def test_titles_without_their_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    titles = tmp_path / "titles.csv"
    titles.write_text("item,name\n1,Heat\n")
    status, said = refused(capsys, "agent", "--config", client(tmp_path, ("ada",)), "--titles", str(titles))
    assert status == DataError.exit_code
    assert "title" in said
    titles.write_text('item,title\n1,"Heat, ""the"" film"\n')
    assert read_titles(titles) == {"1": 'Heat, "the" film'}


@pytest.mark.parametrize("system", ["fedncf", "fcf", "ials", "ease", "fpl", "fedmf", "fedmvmf"])
def test_models_say_which_items_are_alike(system: str) -> None:
    rounds: dict[str, Any] = {} if system == "ease" else {"passes": 2}
    run = RunSettings.model_validate(
        {"system": system, "data": {"synthetic": SPEC}, "rounds": rounds, "federation": {"hosts": 2}}
    )
    made = train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)
    side: Any = made.hosts[0]
    items = np.arange(0, 40, 3)
    model = _model(run, made)
    found = side.alike(model, items, items)
    assert found.shape == (len(items), len(items))
    assert np.isfinite(found).all()
    if system == "ease":
        # What an item adds to the score of another one: together, the score itself.
        own = side._items[0]
        others = np.setdiff1d(np.flatnonzero(model["open"] > 0), own)
        whole = side._scorer(model, whole=False, popularity=False)(own)
        np.testing.assert_allclose(
            side.alike(model, others, own[model["open"][own] > 0]).sum(axis=1), whole[others], atol=1e-5
        )
    else:
        assert (np.abs(found) <= 1 + 1e-9).all()
        there = np.linalg.norm(side.item_vectors(model)[items], axis=1) > 0
        np.testing.assert_allclose(np.diag(found)[there], 1)
        assert not found[~there].any()


def _model(run: RunSettings, made: Any) -> Any:
    from coterie.studies.run_plan import run_plan

    plan = run_plan(run, run_id="a-run", seed=0)
    return server_side(run.system, plan.settings, 40, 0, 1).model(made.trained.arrays)


def test_the_consent_stands_beside_what_the_run_has() -> None:
    rounds = RoundsPlan(passes=10, evaluate_every=1, min_cohort=30, min_sum=25)
    plan = RunPlan(system="fedncf", secure_sum="masked", rounds=rounds)
    rows = {row[0]: row[1:] for row in consent_rows(Consent(max_epsilon=3.0), plan, ("ndcg@10",))}
    assert rows["Smallest cohort"] == ["20 or more", "30"]
    assert rows["What these count"] == ["devices only", "devices"]
    assert rows["Metrics that leave, inside sums"] == ["any", "ndcg@10"]
    mine, its = rows["Epsilon that the whole run may cost you"]
    assert mine == "3 or less"
    assert its.startswith("none: sums are exact")


@pytest.mark.parametrize(("most", "says"), [(0, "none"), (20_000, "up to 20000 users in all")])
def test_a_run_that_others_may_join_later_says_so_beside_the_consent(most: int, says: str) -> None:
    plan = RunPlan(system="fedncf", secure_sum="masked", rounds=RoundsPlan(passes=10, most_users=most))
    rows = {row[0]: row[1:] for row in consent_rows(Consent(), plan, ())}
    assert rows["Users who may come after the run has begun"] == ["any number", says]


def test_epsilon_is_computed_here_whatever_the_plan_states() -> None:
    pytest.importorskip("dp_accounting")
    privacy = PrivacyPlan(
        place="distributed", mechanism="gaussian", noise=2.0, clip=1.0, delta=1e-5, epsilon=0.001
    )
    said = cost(RoundsPlan(passes=10, evaluate_every=1, privacy=privacy))
    assert float(said.split()[0]) > 1
    assert "at delta 1e-05" in said


def test_import_says_what_the_systems_way_of_learning_does_with_it() -> None:
    rounds = RunPlan(system="fedncf", form="hosts", rounds=RoundsPlan())
    assert "Adding sends nothing" in import_words(rounds)
    assert "sends each record, sealed" in import_words(RunPlan(system="drift", form="published"))
    assert "not joined" in import_words(None)


def test_preferences_of_other_systems_are_named_as_not_used() -> None:
    assert [(one["name"], one["systems"]) for one in other_preferences("fedncf")] == [("pi", ["FPL"])]
    assert other_preferences("fpl") == []


class _Process:
    """Part of an agent that ends with an error, as a client process does inside its task group."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def run(self) -> None:
        raise ExceptionGroup("tasks", [self.error])


class _Page:
    def __init__(self) -> None:
        self.reason = ""

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def apart(self, reason: str) -> None:
        self.reason = reason


async def test_a_server_that_stays_away_ends_the_part_in_the_run_and_not_the_page() -> None:
    page: Any = _Page()
    away: Any = _Process(PeerError("cos/cos does not answer"))
    running = asyncio.create_task(_AgentProcess(away, page, Any, print).run())
    await asyncio.sleep(0.05)
    assert not running.done()
    assert page.reason == "cos/cos does not answer"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_any_other_error_ends_the_agent() -> None:
    page: Any = _Page()
    broken: Any = _Process(StoreError("the store is damaged"))
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(_AgentProcess(broken, page, Any, print).run(), 5)
    assert page.reason == ""


def test_before_the_plan_is_known_the_consent_stands_alone() -> None:
    rows = consent_rows(Consent(secure_sums=("masked",)), None, None)
    assert ["How contributions are summed", "masked", "not told yet"] in rows
    assert {row[2] for row in rows} == {"not told yet"}


def test_choices_are_known_with_the_plan_and_after_the_run_only_what_was_published_can_be_forgotten() -> None:
    forms = {name: next(iter(system_named(name).forms)) for name in ("fpl", "fedgnn")}
    rounds = RunPlan(system="fpl", form=forms["fpl"], rounds=RoundsPlan(), settings=FplSettings().to_json())
    drift = RunPlan(system="drift", form="published")
    settings = FedGnnSettings(neighbours=5).to_json()
    graph = RunPlan(system="fedgnn", form=forms["fedgnn"], rounds=RoundsPlan(), settings=settings)
    known = {
        name: choices(plan, Stance(), "/state")["may"]
        for name, plan in (("none", None), ("drift", drift), ("fpl", rounds))
    }
    assert known == {"none": [], "drift": ["pause", "leave"], "fpl": ["pause", "limit", "leave"]}
    during, after = (choices(graph, Stance(), "/state", ended=ended) for ended in (False, True))
    assert (during["may"], after["may"]) == (["pause", "limit", "leave"], ["leave"])
    assert choices(rounds, Stance(), "/state", ended=True)["may"] == []
    assert choices(rounds, Stance(left=True), "/state")["may"] == []
    assert len(during["undone"]) == 2
    assert [line.startswith("What this device has published") for line in after["undone"]] == [True]
    assert choices(rounds, Stance(), "/state", ended=True)["undone"] == []
