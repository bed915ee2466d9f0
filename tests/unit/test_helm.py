"""The Helm chart renders what deploy/kubernetes has, also for other numbers of parties, and refuses the rest."""

import copy
import functools
import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from coterie.cli.main import invoke

from .test_kubernetes import FOLDER, edges, of_kind
from .test_kubernetes_replicas import SMALL

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "coterie"
PYTHON = ROOT / ".venv-kubernetes" / "bin" / "python"
DIGEST = f"sha256:{'ab' * 32}"
HELM_LABELS = {"app.kubernetes.io/managed-by", "helm.sh/chart", "app.kubernetes.io/component"}


def helm(*words):
    if not (PYTHON.parent.parent / ".ready").exists():
        pytest.skip("Helm is not there: `make manifests` installs it")
    return subprocess.run([PYTHON, ROOT / "tests" / "helm_chart.py", *words], capture_output=True, text=True)


def rendered(**values):
    return copy.deepcopy(rendering(json.dumps(values)))


@functools.cache
def rendering(values):
    made = helm("render", values)
    assert made.returncode == 0, made.stderr
    return [one for one in yaml.safe_load_all(made.stdout) if one]


def kustomized(folder):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which puts an overlay together, is not installed")
    made = subprocess.run(["kubectl", "kustomize", FOLDER / folder], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def compared(resources):
    """Return the objects by kind and name, without what differs between the two by their nature."""
    found = {}
    for one in copy.deepcopy(resources):
        kind, name = one["kind"], one["metadata"]["name"]
        if kind in ("Namespace", "ConfigMap") or (kind, name) == ("Job", "bootstrap"):
            continue  # what bootstrap does is compared by what it writes
        labels = one["metadata"].get("labels", {})
        one["metadata"] = {
            "name": "operator" if kind == "Job" else name,
            "labels": {key: value for key, value in labels.items() if key not in HELM_LABELS},
        }
        for direction in ("ingress", "egress"):
            if kind == "NetworkPolicy" and direction in one["spec"]:
                one["spec"][direction].sort(key=ordered)  # rules have no order
        found[kind, one["metadata"]["name"]] = one
    return found


def ordered(rule):
    return json.dumps(rule, sort_keys=True)


def laid_out(resources, root):
    """Run what the job runs; return the configuration of each party by folder, and which folders are volumes."""
    (run,) = of_kind(resources, "ConfigMap").values()
    job = of_kind(resources, "Job")["bootstrap"]["spec"]["template"]["spec"]["containers"][0]
    root.mkdir()
    (root / "run.toml").write_text(run["data"]["run.toml"])
    words = [str(root / "it") if word == "/federation" else word for word in job["args"][2:]]
    with pytest.MonkeyPatch.context() as patch:
        for one in job.get("env", ()):
            patch.setenv(one["name"], one["value"])
        assert invoke(["bootstrap", str(root / "run.toml"), *words, *SMALL]) == 0
    folders = {
        path.parent.name: tomllib.loads(path.read_text()) for path in (root / "it").glob("*/config.toml")
    }
    for name, config in folders.items():
        config.pop("operator_keys", None)  # drawn for each
        config.pop("run", None)
        assert f"/federation/{name}" in {one["mountPath"] for one in job["volumeMounts"]}
    return folders


def test_the_chart_is_linted_without_a_warning_and_is_of_this_release():
    linted = helm("lint")
    assert linted.returncode == 0, linted.stderr
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize(
    ("folder", "values"), [("replicas", {}), ("example", {"coordinators": 1, "intakes": 0})]
)
def test_the_chart_renders_the_objects_of_the_manifests(folder, values, tmp_path):
    made, wanted = rendered(**values), kustomized(folder)
    ours, theirs = compared(made), compared(wanted)
    # An overlay cannot take volumes of further owners away.
    spare = {("PersistentVolumeClaim", f"party-owner-{n}") for n in (1, 2)}
    assert ours.keys() == theirs.keys() - spare
    for key, one in ours.items():
        assert theirs[key] == one, key
    assert laid_out(made, tmp_path / "chart") == laid_out(wanted, tmp_path / "kustomize")


def test_more_parties_and_processes_have_volumes_folders_and_addresses(tmp_path):
    made = rendered(hosts=5, owners=1, coordinators=3, intakes=4)
    sets, claims = of_kind(made, "StatefulSet"), of_kind(made, "PersistentVolumeClaim")
    counts = {"thirdparty": 1, "owner": 1, "host": 5, "coordinator": 3, "intake": 4}
    assert {name: one["spec"]["replicas"] for name, one in sets.items()} == counts
    assert {f"party-{name}-{n}" for name, count in counts.items() for n in range(count)} <= claims.keys()
    folders = laid_out(made, tmp_path / "it")
    assert folders["intake-3"]["coordinator"] == [f"coordinator-{n}.coordinator:7443" for n in range(3)]
    assert folders["host-4"]["cos"]["address"] == "cos:7443"
    policies = of_kind(made, "NetworkPolicy")
    assert edges(policies, "ingress") == edges(policies, "egress")


def test_volumes_outlive_the_release_and_bootstrap_runs_once_and_first_where_that_is_asked():
    first = rendered(prepareOnly=True)
    kinds = {one["kind"] for one in first}
    assert kinds == {"PersistentVolumeClaim", "ConfigMap", "Job"}
    for claim in of_kind(first, "PersistentVolumeClaim").values():
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert of_kind(first, "PersistentVolumeClaim") == of_kind(rendered(), "PersistentVolumeClaim")
    # A job cannot be changed by an upgrade: a hook of the installation is none's concern later.
    job = of_kind(first, "Job")["bootstrap"]
    assert job["metadata"]["annotations"] == {"helm.sh/hook": "post-install"}


def test_an_image_is_named_by_its_digest_where_one_is_given():
    made = rendered(images={"registry": "registry.example", "digests": {"cos-postgres": DIGEST}})
    for name in ("coordinator", "intake"):
        pod = of_kind(made, "StatefulSet")[name]["spec"]["template"]["spec"]
        images = {one["image"] for one in (*pod["containers"], *pod["initContainers"])}
        assert images == {f"registry.example/coterie-cos-postgres@{DIGEST}"}
    host = of_kind(made, "StatefulSet")["host"]["spec"]["template"]["spec"]["containers"][0]
    assert host["image"] == "registry.example/coterie-client:0.1.0"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"coordinators": 2, "intakes": 0}, "/coordinators"),
        ({"intakes": 33}, "/intakes"),
        ({"hosts": 0}, "/hosts"),
        ({"intake": 2}, "intake"),
        ({"images": {"digests": {"cos": "sha256:short"}}}, "/images/digests/cos"),
        ({"images": {"digests": {"coss": DIGEST}}}, "coss"),
    ],
)
def test_values_that_do_not_go_are_refused_by_name(values, said):
    made = helm("render", json.dumps(values))
    assert made.returncode == 1
    assert said in made.stderr
