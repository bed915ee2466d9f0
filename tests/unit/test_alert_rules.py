"""The alert rules of deploy/observability, judged by Prometheus's own tool."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
ALERTS = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules.test.yml"),
    ],
)
def test_prometheus_takes_the_configuration_and_its_rules_do_what_they_say(words):
    ended = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_is_tested_in_both_states_and_says_what_to_do():
    tests = yaml.safe_load((FOLDER / "rules.test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == {
        rule["alert"] for rule in ALERTS
    }
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "action", "runbook"}


def test_every_alert_has_a_section_of_the_runbook_and_every_section_an_alert():
    page = (ROOT / "docs" / "alerts.md").read_text()
    sections = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    content = dict(zip(sections[::2], sections[1::2], strict=True))
    names = [rule["alert"] for rule in ALERTS]
    assert list(content) == names
    for rule in ALERTS:
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in content[name], f"{name} has no {part}"
        assert f"`{rule['labels']['severity']}`" in content[name], name


def test_rules_ask_for_metrics_that_services_have():
    documented = set(re.findall(r"`(coterie_[a-z_]+)`", (ROOT / "docs" / "architecture.md").read_text()))
    asked = {name for rule in ALERTS for name in re.findall(r"coterie_[a-z_]+", rule["expr"])}
    assert len(asked) >= 10
    assert asked <= documented


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_prometheus_reaches_every_process_of_a_replicated_cos_and_names_it():
    names = ["fedncf", "replicas", "observability", "replicas.observability"]
    files = ["docker-compose.yml", *(f"docker-compose.{name}.yml" for name in names)]
    ended = subprocess.run(
        ["docker-compose", *(word for file in files for word in ("--file", file)), "config"],
        cwd=ROOT / "deploy",
        env={**os.environ, "COTERIE_METRICS": "0.0.0.0:9464"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    services = yaml.safe_load(ended.stdout)["services"]
    watched = {
        target.removesuffix(":9464"): group["labels"]
        for file in (FOLDER / "targets").glob("*.yml")
        for group in yaml.safe_load(file.read_text())
        for target in group["targets"]
    }
    networks = set(services["prometheus"]["networks"])
    processes = {name for name in services if re.fullmatch(r"(coordinator|intake)-\d", name)}
    assert {name for name, labels in watched.items() if "part" in labels} == processes
    for name in processes:
        assert watched[name]["part"] == name.partition("-")[0]
        assert networks & set(services[name]["networks"]), name
        assert services[name]["environment"]["COTERIE_METRICS"] == "0.0.0.0:9464", name
