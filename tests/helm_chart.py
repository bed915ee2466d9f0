"""Helm on the chart of deploy/helm, for the tests and `make manifests`: run by the Python of .venv-kubernetes.

helm_chart.py lint             ends with 1 and says why, where the chart has an error or a warning
helm_chart.py render [JSON]    prints what the chart renders with these values; ends with 1 where they are refused
"""

import json
import sys
from pathlib import Path

import helm_python

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "coterie"
_WARNING = 2
_KUBERNETES = "v1.32.0"


def lint():
    """Print each finding that is a warning or an error, and end with 1 if there are any."""
    report = helm_python.lint(CHART, strict=True, kube_version=_KUBERNETES)
    found = [f"{one['path']}: {one['error']}" for one in report["messages"] if one["severity"] >= _WARNING]
    if found or report["errors"]:
        sys.exit("\n".join([*found, *report["errors"]]))
    print(f"{report['total_charts_linted']} chart linted")


def render(values):
    """Print all manifests as one YAML stream."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        made = chart.render(values, name="coterie", namespace="coterie", revision=1, is_install=True)
    print("\n---\n".join(text for _, text in sorted(made.items()) if text.strip()))


def main():
    """Do what the first argument says."""
    command, *rest = sys.argv[1:]
    try:
        if command == "lint":
            lint()
        else:
            render(json.loads(rest[0]) if rest else {})
    except helm_python.HelmError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
