"""What an operator sees of running services: health that tells the truth, metrics, structured logs."""

import re
import urllib.request
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"

LABELS = {
    "coterie_rpc_calls_total": {"side", "rpc"},
    "coterie_rpc_errors_total": {"side", "rpc"},
    "coterie_rpc_bytes_total": {"side", "rpc", "direction"},
    "coterie_rpc_milliseconds": {"side", "rpc", "quantile"},
    "coterie_refusals_total": {"rpc", "reason"},
    "coterie_limited_total": {"limit"},
    "coterie_open_calls": set(),
    "coterie_certificate_expiry_timestamp_seconds": set(),
    "coterie_certificate_renewals_total": {"outcome"},
    "coterie_condition": {"condition"},
    "coterie_cpu_seconds_total": {"activity"},
    "coterie_peak_rss_mebibytes": set(),
    "coterie_serving": set(),
}
"""Labels by name: RPCs, sides, reasons and activities, of which there are few."""


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


async def test_metrics_pages_are_valid_and_hold_the_documented_names_and_no_other(small, federation):
    settings = small(drift={"epochs": 5000}, federation={"owners": 1, "hosts": 1})
    async with federation(settings) as running:
        await running.start()
        await running.phase("epoch", 2)
        pages = {party: running.page(party) for party in running.children}
        strict = {party: openmetrics(running.metrics[party]) for party in running.children}

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
        assert values["coterie_peak_rss_mebibytes",] > 10
        assert values["coterie_cpu_seconds_total", "total"] > 0
        assert all(family.documentation for family in families)
        if party == "cos/cos":
            assert values["coterie_rpc_calls_total", "Exchange", "server"] > 0
            assert values["coterie_rpc_bytes_total", "Exchange", "in", "server"] > 0
            assert values["coterie_cpu_seconds_total", "apply gradients"] > 0
            assert values["coterie_rpc_milliseconds", "Exchange", "p99", "server"] > 0
        if party.startswith("client/"):
            assert values["coterie_rpc_calls_total", "SubmitInteractions", "client"] > 0


def openmetrics(address):
    """Return a metrics page in the stricter form that scrapers ask for."""
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=10) as page:
        assert page.headers["Content-Type"].startswith("application/openmetrics-text")
        return page.read().decode()


async def test_logs_tell_the_story_of_a_process_in_json(small, federation):
    async with federation(small(federation={"owners": 1, "hosts": 1})) as running:
        await running.start()
        await running.ended()
        for party in (*running.parties("data-owner"), *running.parties("client")):
            await running.comes_true(
                lambda party=party: "the run has ended" in running.children[party].log.read_text(),
                f"{party} knows that the run has ended",
            )

    assert running.ended_well()
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
