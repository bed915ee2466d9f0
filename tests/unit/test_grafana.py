"""The Grafana dashboard of deploy/observability asks for metrics, and labels of them, that services export."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "observability" / "grafana.json").read_text())
EVERYWHERE = {"instance", "job", "role"}
"""Labels that Prometheus gives, from `deploy/observability/targets`."""


def asked() -> list[str]:
    """Return all expressions of the dashboard."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """Return the labels of each metric that the code exports, by the name that Prometheus sees."""
    found: dict[str, set[str]] = {}
    for folder in ("coterie", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "coterie_" not in text:
                continue
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and (named := _metric(call)):
                    found[named[0]] = named[1]
    return found


def _metric(call: ast.Call) -> tuple[str, set[str]] | None:
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if kind not in ("CounterMetricFamily", "GaugeMetricFamily", "PrometheusMetric"):
        return None
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Constant):
        return None
    given: dict[str, Any] = {
        one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg in ("labels", "counter")
    }
    labels = given.get("labels") or (ast.literal_eval(call.args[3]) if len(call.args) > 3 else ())
    counts = kind == "CounterMetricFamily" or given.get("counter", False)
    return str(first.value) + ("_total" if counts else ""), set(labels)


def test_every_metric_of_the_dashboard_is_exported_with_the_labels_that_it_asks_for() -> None:
    known = exported()
    assert len(known) >= 20
    used = set()
    for expression in asked():
        names = set(re.findall(r"coterie_[a-z_]+", expression)) - {"coterie"}
        assert names <= known.keys(), expression
        used |= names
        labels = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
        labels |= {
            one.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for one in group.split(",")
        }
        may = set.union(EVERYWHERE, *(known[name] for name in names))
        assert labels <= may, expression
    # Every metric that is more than a detail of another one has a panel.
    assert known.keys() - used <= {"coterie_peak_rss_mebibytes", "coterie_log_entries"}


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            if kept:
                shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                assert shown <= {one.strip() for one in kept[0].split(",")}, panel["title"]


def test_panels_do_not_overlap_and_name_no_data_source_of_ours() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["datasource"]["uid"] == "${source}"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(asked())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    ended = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
