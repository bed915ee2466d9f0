"""The manifests of a replicated COS: processes fit what bootstrap prepares, and only intakes reach a coordinator."""

import shutil
import subprocess
import tomllib

import pytest
import yaml

from coterie.cli.main import invoke
from coterie.config.load import load_service
from coterie.net.authorisation import callers_of

from .test_kubernetes import FOLDER, ROOT, edges, of_kind, pods

NAME = "app.kubernetes.io/name"
PROCESSES = ("coordinator", "intake")
SMALL = ["data.synthetic.users=40", "data.synthetic.items=60", "data.synthetic.interactions=800"]
SMALL = [word for key in (*SMALL, "rounds.cohort=20", "rounds.group=20") for word in ("--set", key)]
"""A run that is laid out faster."""

ROLES = {"thirdparty": "thirdparty", "owner": "data-owner", "host": "client", "operator": "operator"}


@pytest.fixture(scope="module")
def resources():
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which puts an overlay together, is not installed")
    made = subprocess.run(["kubectl", "kustomize", FOLDER / "replicas"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def container_of(resources, name):
    (found,) = of_kind(resources, "StatefulSet")[name]["spec"]["template"]["spec"]["containers"]
    return found


def bootstrap_of(resources):
    (pod,) = (pod for name, pod in pods(resources) if name == "bootstrap")
    return pod


@pytest.fixture(scope="module")
def laid_out(resources, tmp_path_factory):
    """Run what the job runs, with its arguments and its environment."""
    root = tmp_path_factory.mktemp("federation")
    (job,) = bootstrap_of(resources)["containers"]
    environment = {one["name"]: one["value"] for one in job["env"]}
    (run,) = of_kind(resources, "ConfigMap").values()
    (root / "run.toml").write_text(run["data"]["run.toml"])
    command, file, *rest = job["args"]
    assert (command, file) == ("bootstrap", "/etc/coterie/run.toml")
    words = [str(root / "it") if word == "/federation" else word for word in rest]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        assert invoke(["bootstrap", str(root / "run.toml"), *words, *SMALL]) == 0
    return root / "it"


def test_bootstrap_writes_the_folder_of_every_volume_that_a_process_mounts(resources, laid_out):
    sets, claims = of_kind(resources, "StatefulSet"), of_kind(resources, "PersistentVolumeClaim")
    assert sets.keys() == {*PROCESSES, "thirdparty", "owner", "host"}
    pod = bootstrap_of(resources)
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    claimed = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod["volumes"]
        if "persistentVolumeClaim" in one
    }
    for name in PROCESSES:
        assert sets[name]["spec"]["replicas"] == 2
        for n in range(2):
            folder = f"{name}-{n}"
            assert f"party-{folder}" in claims
            assert claimed[folder] == f"party-{folder}"
            assert mounts[folder] == f"/federation/{folder}"
            assert (laid_out / folder / "token").exists()
    assert "party-cos-0" not in claims
    assert {path.name for path in laid_out.iterdir()} <= {path.rpartition("/")[2] for path in mounts.values()}


def test_each_process_starts_with_its_folder_and_the_database_of_the_secret(resources, laid_out, monkeypatch):
    for name in PROCESSES:
        container = container_of(resources, name)
        assert container["image"] == "registry.example/coterie-cos-postgres:0.1.0"
        secret = {
            one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one
        }
        assert secret == {
            "COTERIE_DATABASE__URL": {"name": "database", "key": "url"},
            "PGPASSWORD": {"name": "database", "key": "password"},
        }
        monkeypatch.setenv("COTERIE_DATABASE__URL", "postgresql+psycopg://coterie@db/coterie")
        for n in range(2):
            found = load_service("cos", laid_out / f"{name}-{n}" / "config.toml").settings
            assert found.part == name
            assert found.standby is (name == "coordinator")
            if name == "intake":
                assert found.coordinator == tuple(f"coordinator-{m}.coordinator:7443" for m in range(2))


def test_parties_find_the_intakes_behind_the_service_that_their_folders_name(resources, laid_out):
    for party in ("owner-0", "host-3", "operator"):
        told = tomllib.loads((laid_out / party / "config.toml").read_text())["cos"]
        assert told == {"address": "cos:7443", "name": "cos"}
    services, sets = of_kind(resources, "Service"), of_kind(resources, "StatefulSet")
    # Balanced, and only over those that are ready.
    assert services["cos"]["spec"] == {
        "selector": {NAME: "intake"},
        "ports": [{"name": "grpc", "port": 7443}],
    }
    for name in PROCESSES:
        spec = services[name]["spec"]
        assert sets[name]["spec"]["serviceName"] == name
        assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
        assert spec["selector"] == {NAME: name}


def test_an_intake_is_ready_when_it_serves_and_a_standby_when_it_could_take_over(resources):
    alive = {name: container_of(resources, name)["livenessProbe"]["exec"]["command"] for name in PROCESSES}
    ready = {name: container_of(resources, name)["readinessProbe"]["exec"]["command"] for name in PROCESSES}
    assert all("--alive" in words for words in alive.values())
    assert "--alive" not in ready["intake"]
    # A budget and a rolling update that waited for the standby to serve would never let the other one go.
    assert ready["coordinator"] == alive["coordinator"]


def test_one_process_of_each_kind_stays_while_nodes_are_emptied(resources):
    budgets, sets = of_kind(resources, "PodDisruptionBudget"), of_kind(resources, "StatefulSet")
    assert budgets.keys() == set(PROCESSES)
    for name, one in budgets.items():
        assert one["spec"]["maxUnavailable"] == 1
        assert one["spec"]["selector"] == {"matchLabels": {NAME: name}}
        pod = sets[name]["spec"]["template"]
        assert pod["metadata"]["labels"][NAME] == name
        spread = pod["spec"]["topologySpreadConstraints"]
        assert all(rule["labelSelector"] == {"matchLabels": {NAME: name}} for rule in spread)
        assert "topology.kubernetes.io/zone" in {rule["topologyKey"] for rule in spread}
    (apart,) = sets["coordinator"]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart["topologyKey"] == "kubernetes.io/hostname"


def test_only_intakes_reach_a_coordinator_and_no_party_reaches_another_but_as_its_role_may(resources):
    policies = of_kind(resources, "NetworkPolicy")
    wanted = {
        (caller, called, 7443)
        for caller, role in ROLES.items()
        for called in ("thirdparty", "owner", "host")
        if role in callers_of(ROLES[called])
    }
    wanted |= {(caller, "intake", 7443) for caller in ("owner", "host", "operator")}
    wanted |= {("intake", "coordinator", 7443)}
    callers = [*PROCESSES, "owner", "host", "operator"]
    wanted |= {(caller, "thirdparty", port) for caller in callers for port in (7443, 7444)}
    wanted |= {(name, "postgresql", 5432) for name in PROCESSES}
    assert edges(policies, "ingress") == edges(policies, "egress") == wanted
    assert ("host", "host", 7443) not in wanted
    assert policies["nobody"]["spec"]["podSelector"] == {}
    # Names are asked of the cluster's name service alone, and metrics are for Prometheus.
    (names,) = policies["names"]["spec"]["egress"]
    assert [one["podSelector"] for one in names["to"]] == [{"matchLabels": {"k8s-app": "kube-dns"}}]
    for policy in ("names", "metrics"):
        (asked,) = policies[policy]["spec"]["podSelector"]["matchExpressions"]
        assert set(PROCESSES) <= set(asked["values"])
        assert "cos" not in asked["values"]


def test_containers_have_limits_and_no_rights(resources):
    for name in PROCESSES:
        pod = of_kind(resources, "StatefulSet")[name]["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod["containers"], *pod["initContainers"]):
            assert container["resources"]["limits"].keys() == {"cpu", "memory"}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        (secret,) = (one["secret"] for one in pod["volumes"] if "secret" in one)
        # Files of a secret can be read by the group: no password is among them.
        assert [one["key"] for one in secret["items"]] == ["ca.pem"]


def test_images_are_released_targets_of_the_dockerfile(resources):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    stages = (ROOT / "deploy" / "Dockerfile").read_text()
    for name in PROCESSES:
        image, _, tag = container_of(resources, name)["image"].rpartition("/")[2].partition(":")
        assert tag == version
        assert f" AS {image.removeprefix('coterie-')}\n" in stages
