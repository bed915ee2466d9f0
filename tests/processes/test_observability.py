"""An operator's view of running services: true health, metrics, structured logs."""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from coterie.launch.children import free_port
from coterie.wire.versions import NEWEST, release

from .patience import WAIT_S

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
OBSERVABILITY = ROOT / "deploy" / "observability"

LABELS = {
    "coterie_build_info": {"version", "protocol", "oldest_protocol", "python"},
    "coterie_rpc_calls_total": {"side", "rpc"},
    "coterie_rpc_errors_total": {"side", "rpc"},
    "coterie_rpc_bytes_total": {"side", "rpc", "direction"},
    "coterie_rpc_milliseconds": {"side", "rpc", "quantile"},
    "coterie_refusals_total": {"rpc", "reason"},
    "coterie_limited_total": {"limit", "caller"},
    "coterie_open_calls": set(),
    "coterie_certificate_expiry_timestamp_seconds": set(),
    "coterie_certificate_renewals_total": {"outcome"},
    "coterie_condition": {"condition"},
    "coterie_cpu_seconds_total": {"activity"},
    "coterie_peak_rss_mebibytes": set(),
    "coterie_serving": set(),
    "coterie_disk_free_bytes": set(),
    "coterie_disk_size_bytes": set(),
    "coterie_resident_memory_bytes": set(),
    "coterie_memory_limit_bytes": set(),
    "coterie_revocation_list_age_seconds": set(),
    "coterie_log_entries": set(),
    "coterie_clock_skew_seconds": {"party"},
    "coterie_rounds_total": {"purpose", "outcome"},
    "coterie_runs_in_progress": set(),
    "coterie_runs_waiting": set(),
    "coterie_runs_resumable": set(),
    "coterie_runs_ended": {"outcome"},
    "coterie_model_versions_total": set(),
}
"""Labels by name: RPCs, sides, reasons, limits, roles, conditions, activities, purposes, outcomes: few of each."""


async def test_health_is_serving_only_while_everything_that_a_service_needs_is_there(small, federation):
    settings = small(drift={"epochs": 5000}, federation={"owners": 1, "hosts": 1})
    late = "client/host-0"
    async with federation(settings, hold=[late]) as running:
        await running.start()
        (owner,) = running.parties("data-owner")
        cos, directory = "cos/cos", "thirdparty/directory"
        await running.becomes("SERVING", directory, cos, owner)

        # A party without the COS has no place in a run.
        running.children[cos].kill()
        await running.becomes("NOT_SERVING", owner)
        running.release(late)
        assert await running.first_health(late) == "NOT_SERVING"
        assert await running.health(directory) == "SERVING"
        assert await running.health(cos) is None
        running.children[cos].start()
        await running.becomes("SERVING", cos, owner, late)

        # Whoever starts without the third party does not know whom it may trust; whoever ran before does for a while.
        running.children[directory].kill()
        running.kill_and_restart(owner, cos)
        assert await running.first_health(owner) == "NOT_SERVING"
        assert await running.first_health(cos) == "NOT_SERVING"
        running.children[directory].start()
        await running.becomes("SERVING", directory, cos, owner, late)
        await running.phase("epoch", 2)
    assert running.ended_well()


async def test_metrics_pages_are_valid_and_hold_the_documented_names_and_no_other(
    small, federation, tmp_path
):
    settings = small(drift={"epochs": 5000}, federation={"owners": 1, "hosts": 1})
    began = time.monotonic()
    async with federation(settings) as running:
        await running.start()
        await running.phase("epoch", 2)
        pages = {party: running.page(party) for party in running.children}
        strict = {party: openmetrics(running.metrics[party]) for party in running.children}
        lasted = time.monotonic() - began
        await asyncio.to_thread(scrape, running.metrics, tmp_path)

    documented = set(re.findall(r"`(coterie_[a-z_]+)`", DOCUMENT.read_text()))
    assert documented == LABELS.keys()
    for party, page in pages.items():
        families = list(parse(page))
        assert [family.name for family in parse_openmetrics(strict[party])] == [
            family.name.removesuffix("_total") for family in families
        ]
        samples = [sample for family in families for sample in family.samples]
        assert {sample.name for sample in samples} <= documented
        for sample in samples:
            assert sample.labels.keys() == LABELS[sample.name], sample
            assert sample.value >= 0
        values = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}
        assert values["coterie_serving",] == 1
        build = next(sample.labels for sample in samples if sample.name == "coterie_build_info")
        assert (build["version"], build["protocol"]) == (release(), str(NEWEST))
        assert values["coterie_peak_rss_mebibytes",] > 10
        assert values["coterie_cpu_seconds_total", "total"] > 0
        assert values["coterie_disk_size_bytes",] > values["coterie_disk_free_bytes",] > 0
        assert 1 << 24 < values["coterie_resident_memory_bytes",] < 1 << 31
        assert party == "thirdparty/directory" or values["coterie_revocation_list_age_seconds",] < lasted
        assert party == "thirdparty/directory" or values["coterie_log_entries",] > 0
        assert all(family.documentation for family in families)
        if party == "cos/cos":
            assert values["coterie_runs_in_progress",] == 1
            assert values["coterie_model_versions_total",] > 0
            assert values["coterie_rpc_calls_total", "Poll", "server"] > 0
            assert values["coterie_rpc_bytes_total", "ExchangeMany", "in", "server"] > 0
            assert values["coterie_cpu_seconds_total", "apply gradients"] > 0
            assert values["coterie_rpc_milliseconds", "Poll", "p99", "server"] > 0
        if party.startswith("client/"):
            assert values["coterie_rpc_calls_total", "SubmitInteractions", "client"] > 0


def scrape(metrics, folder):
    """Let a real Prometheus with the configuration of deploy/ look at the services, and ask it what it saw."""
    if shutil.which("prometheus") is None:
        return
    shutil.copytree(OBSERVABILITY, folder / "etc")
    (folder / "etc/targets/compose.yml").write_text(
        json.dumps(
            [{"targets": [at], "labels": {"role": party.split("/")[0]}} for party, at in metrics.items()]
        )
    )
    config = folder / "etc/prometheus.yml"
    config.write_text(config.read_text().replace("_interval: 15s", "_interval: 500ms"))
    address = f"127.0.0.1:{free_port()}"
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)

    def ask(path):
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)["data"]

    def seen():
        with contextlib.suppress(OSError):
            asked = ask("query?query=coterie_serving==1")
            rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
            if len(asked["result"]) == len(metrics) and all(rule["health"] == "ok" for rule in rules):
                return asked["result"], rules
        return None

    try:
        deadline = time.monotonic() + WAIT_S
        while (found := seen()) is None:
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(timeout=WAIT_S)
    serving, rules = found
    assert {one["metric"]["role"] for one in serving} == {party.split("/")[0] for party in metrics}
    assert len(rules) >= 9
    # Nothing is wrong with these, but that they run on a machine whose disk may be full.
    assert {rule["name"] for rule in rules if rule["state"] != "inactive"} <= {"CoterieDiskLow"}


def openmetrics(address):
    """Return a metrics page in the stricter form that scrapers ask for."""
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=10) as page:
        assert page.headers["Content-Type"].startswith("application/openmetrics-text")
        return page.read().decode()


@pytest.mark.xdist_group("one owner")
def test_logs_tell_the_story_of_a_process_in_json(one_owner):
    running, _ = one_owner.run()
    story = {
        "thirdparty/directory": ["listening", "taking enrolments", "enrolled", "stopping", "stopped"],
        "cos/cos": ["enrolling", "enrolled", "listening", "run ended", "stopping", "stopped"],
        "data-owner": ["enrolling", "enrolled", "listening", "joined", "pass done", "the run has ended"],
        "client": ["enrolling", "enrolled", "listening", "joined", "delivered", "the run has ended"],
    }
    for party in running.children:
        told = [line["event"] for line in running.log(party)]
        wanted = story.get(party) or story[party.partition("/")[0]]
        positions = [told.index(event) for event in wanted]
        assert positions == sorted(positions), told
