"""The manifests of deploy/kubernetes fit each other, the images and what is asked of containers."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from coterie.config.load import load
from coterie.config.run import RunSettings
from coterie.net.authorisation import callers_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PARTIES = {"thirdparty": "thirdparty", "cos": "cos", "owner": "data-owner", "host": "client"}


def read(folder):
    return [
        one
        for path in sorted((FOLDER / folder).glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if path.name != "kustomization.yaml" and isinstance(one, dict)
    ]


def of_kind(resources, kind):
    return {one["metadata"]["name"]: one for one in resources if one["kind"] == kind}


@pytest.fixture(scope="module", params=["base", "example"])
def rendered(request):
    if shutil.which("kubectl") is None:
        if request.param == "example":
            pytest.skip("kubectl, which puts an overlay together, is not installed")
        return read("base"), FOLDER / "base" / "run.toml"
    made = subprocess.run(["kubectl", "kustomize", FOLDER / request.param], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout)), FOLDER / request.param / "run.toml"


def pods(resources):
    for one in resources:
        if one["kind"] in ("StatefulSet", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def test_there_are_as_many_parties_with_volumes_as_the_run_has(rendered):
    resources, run = rendered
    settings = load(RunSettings, run).settings
    sets, claims = of_kind(resources, "StatefulSet"), of_kind(resources, "PersistentVolumeClaim")
    owners = settings.federation.owners if settings.system == "drift" else 1
    wanted = {"thirdparty": 1, "cos": 1, "owner": owners, "host": settings.federation.hosts}
    assert {name: one["spec"]["replicas"] for name, one in sets.items()} == wanted
    single = [f"{name}-0" for name in ("thirdparty", "cos")]
    of_sets = {f"party-{name}-{n}" for name, count in wanted.items() for n in range(count)}
    assert of_sets <= claims.keys()

    (bootstrap,) = (pod for name, pod in pods(resources) if name == "bootstrap")
    mounted = {one["name"]: one["mountPath"] for one in bootstrap["containers"][0]["volumeMounts"]}
    claimed = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in bootstrap["volumes"]
        if "persistentVolumeClaim" in one
    }
    for claim in of_sets:
        party = claim.removeprefix("party-")
        folder = party.removesuffix("-0") if party in single else party
        assert claimed[folder] == claim
        assert mounted[folder] == f"/federation/{folder}"
    args = bootstrap["containers"][0]["args"]
    addresses = [word for word in args if "=" in word]
    assert addresses == [f"owner-{n}=owner-{n}.owner:7443" for n in range(owners)]


@pytest.mark.parametrize("folder", ["base", "example", "replicas"])
def test_what_bootstrap_needs_can_be_applied_before_all_else(folder):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which puts an overlay together, is not installed")
    made = subprocess.run(["kubectl", "kustomize", FOLDER / folder], capture_output=True, text=True)
    resources = list(yaml.safe_load_all(made.stdout))
    first = {
        (one["kind"], one["metadata"]["name"])
        for one in resources
        if one["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "preparation"
    }
    (pod,) = (pod for name, pod in pods(resources) if name == "bootstrap")
    needed = {("Job", "bootstrap")}
    for one in pod["volumes"]:
        if "persistentVolumeClaim" in one:
            needed.add(("PersistentVolumeClaim", one["persistentVolumeClaim"]["claimName"]))
        if "configMap" in one:
            needed.add(("ConfigMap", one["configMap"]["name"]))
    assert needed <= first
    # Pods that wait would hold its volumes on other nodes.
    kinds = {kind for kind, name in first - {("Job", "bootstrap")}}
    assert kinds <= {"Namespace", "ConfigMap", "PersistentVolumeClaim"}
    assert [one for one in resources if one["kind"] == "Namespace"] == [
        one for one in resources if ("Namespace", one["metadata"]["name"]) in first
    ]


def test_every_container_has_limits_and_no_rights(rendered):
    resources, _ = rendered
    seen = 0
    for name, pod in pods(resources):
        assert pod["automountServiceAccountToken"] is False, name
        context = pod["securityContext"]
        assert (context["runAsUser"], context["runAsNonRoot"]) == (10001, True), name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            seen += 1
            assert container["resources"]["limits"].keys() == {"cpu", "memory"}, name
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    assert seen >= 11


def test_parties_are_probed_for_life_and_readiness_and_found_before_they_are_ready(rendered):
    resources, _ = rendered
    sets, services = of_kind(resources, "StatefulSet"), of_kind(resources, "Service")
    assert sets.keys() == services.keys() == PARTIES.keys()
    for name, role in PARTIES.items():
        (container,) = sets[name]["spec"]["template"]["spec"]["containers"]
        assert container["image"].rpartition("/")[2].partition(":")[0] == f"coterie-{role}"
        assert "args" not in container  # the image knows its role
        alive, ready = (container[f"{kind}Probe"]["exec"]["command"] for kind in ("liveness", "readiness"))
        assert "--alive" in alive
        assert container["startupProbe"]["exec"]["command"] == alive
        assert [word for word in alive if word != "--alive"] == ready
        service = services[name]["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert service["selector"].items() <= sets[name]["spec"]["template"]["metadata"]["labels"].items()
        assert {one["port"] for one in service["ports"]} == {
            one["containerPort"] for one in container["ports"]
        }


def names_of(selector):
    """Return the pods that a selector of this namespace selects, by name; all of them for an empty one."""
    labels = selector.get("matchLabels", {})
    if "app.kubernetes.io/name" in labels:
        return {labels["app.kubernetes.io/name"]}
    for one in selector.get("matchExpressions", ()):
        if (one["key"], one["operator"]) == ("app.kubernetes.io/name", "In"):
            return set(one["values"])
    return {*PARTIES, "operator", "bootstrap"}


def edges(policies, direction):
    """Return who may open connections to whom, on which ports, as the rules of one direction say."""
    found = set()
    for one in policies.values():
        own = names_of(one["spec"]["podSelector"])
        for rule in one["spec"].get(direction, ()):
            ports = {port["port"] for port in rule["ports"]}
            for peer in rule["to" if direction == "egress" else "from"]:
                if "namespaceSelector" in peer:
                    continue
                for other in names_of(peer["podSelector"]):
                    for name in own:
                        pair = (name, other) if direction == "egress" else (other, name)
                        found |= {(*pair, port) for port in ports}
    return found


def test_connections_are_let_through_for_those_who_may_call_and_for_nobody_else(rendered):
    policies = of_kind(rendered[0], "NetworkPolicy")
    roles = {**PARTIES, "operator": "operator"}
    wanted = {
        (caller, called, 7443)
        for caller, role in roles.items()
        for called in PARTIES
        if role in callers_of(PARTIES[called])
    }
    # The COS may ask owners and does not: it hears from them.
    wanted -= {("cos", "owner", 7443)}
    wanted |= {(caller, "thirdparty", 7444) for caller in roles if caller != "thirdparty"}
    assert edges(policies, "ingress") == edges(policies, "egress") == wanted

    # Whatever is not let through is not: for all pods, in both directions.
    nobody = policies["nobody"]["spec"]
    assert nobody == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    elsewhere = {
        (
            name,
            next(iter(peer["podSelector"]["matchLabels"].items())),
            tuple(port["port"] for port in rule["ports"]),
        )
        for name, one in policies.items()
        for rule in (*one["spec"].get("egress", ()), *one["spec"].get("ingress", ()))
        for peer in (*rule.get("to", ()), *rule.get("from", ()))
        if "namespaceSelector" in peer
    }
    assert elsewhere == {
        ("names", ("k8s-app", "kube-dns"), (53, 53)),
        ("metrics", ("app.kubernetes.io/name", "prometheus"), (9464,)),
    }


def test_images_are_targets_of_the_dockerfile_and_the_example_has_the_released_ones():
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    used = {
        container["image"]
        for _, pod in pods(read("base"))
        for container in (*pod["containers"], *pod.get("initContainers", ()))
    }
    assert {image.removeprefix("coterie-") for image in used} <= set(targets)
    example = yaml.safe_load((FOLDER / "example" / "kustomization.yaml").read_text())
    assert {one["name"] for one in example["images"]} == used
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {one["newTag"] for one in example["images"]} == {version}
