"""The images hold what their role needs and nothing to build or break in with."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from .engine import BASE_IMAGES

pytestmark = pytest.mark.containers

ROOT = Path(__file__).parents[2]
MOST_BYTES = {"thirdparty": 300e6, "data-owner": 300e6, "cos": 420e6, "client": 420e6, "operator": 490e6}
MOST_BYTES["decrypting-client"] = MOST_BYTES["client"]
SUMMING = ("cos", "client", "decrypting-client")
ENCRYPTING = ("thirdparty", *SUMMING)
WRITTEN_AT = "1767225600"
"""SOURCE_DATE_EPOCH of the Dockerfile."""


@pytest.fixture(params=sorted(MOST_BYTES))
def role(request):
    return request.param


@pytest.fixture
def image(role, engine, images):
    return engine.client.images.get(f"coterie-{role}:{images['COTERIE_TAG']}")


def run(engine, image, *command, user=None):
    """Run a command in a container of its own and return its status and what it printed."""
    container = engine.client.containers.create(
        image.id, list(command), entrypoint="", network_mode="none", user=user
    )
    try:
        container.start()
        status = container.wait()["StatusCode"]
        return status, container.logs().decode()
    finally:
        container.remove(force=True)


def test_an_image_is_small(role, image):
    assert image.attrs["Size"] < MOST_BYTES[role]


def test_an_image_says_what_it_is(role, image):
    labels = image.labels
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["org.opencontainers.image.title"] == f"coterie-{role}"
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    command = ["--help"] if role == "operator" else ["serve", role, "--config", "/party/config.toml"]
    assert image.attrs["Config"]["Cmd"] == command


def test_images_share_all_layers_but_those_of_their_role(engine, images):
    layers = {
        one: engine.client.images.get(f"coterie-{one}:{images['COTERIE_TAG']}").attrs["RootFS"]["Layers"]
        for one in MOST_BYTES
    }
    assert layers["cos"] == layers["client"] == layers["decrypting-client"]
    # All but the layers of packages and of kernels.
    assert layers["thirdparty"][:-1] == layers["cos"][:-3] == layers["data-owner"]
    # The packages that account for noise, too, which are the largest layer.
    assert layers["operator"][: len(layers["cos"]) - 2] == layers["cos"][:-2]


def test_images_that_compute_with_contributions_have_the_compiled_kernels(engine, image, role):
    found = versions(engine, image)
    if role not in SUMMING:
        assert found["kernels"] == "not installed"
        return
    assert found["kernels"][0].isdigit(), found
    # Every kernel computes here what the reference does; masks are left out where the processor makes them slower.
    assert all(why == "is slower than the reference here" for why in found["left_out"].values()), found


def versions(engine, image):
    """Return what `coterie version` says in a container; its words on standard error come in any order."""
    status, said = run(engine, image, "coterie", "version", "--json")
    assert status == 0, said
    (answer,) = [line for line in said.splitlines() if line.startswith("{")]
    return json.loads(answer)["result"]


def test_an_image_starts_as_a_user_without_rights(engine, image):
    assert image.attrs["Config"]["User"] == "10001:10001"
    assert run(engine, image, "id", "-u") == (0, "10001\n")


def test_an_image_has_no_compiler_and_no_installer(engine, image):
    look = "command -v sh; for program in cc gcc g++ clang as ld make pip pip3; do command -v $program; done"
    _, found = run(engine, image, "sh", "-c", look)
    assert [path.rpartition("/")[2] for path in found.split()] == ["sh"]  # found, so the search works
    status, _ = run(engine, image, "python3", "-c", "import pip")
    assert status != 0


def test_an_image_has_no_packages_of_other_roles(engine, image, role):
    # phe's licence would be that of whatever it is distributed with.
    foreign = ["torch", "polars", "pytest", "grpc_tools", "phe"]
    foreign += [] if role == "operator" else ["matplotlib"]
    foreign += [] if role in ENCRYPTING else ["gmpy2"]
    foreign += [] if role in SUMMING else ["coterie_native"]
    foreign += [] if role in SUMMING or role == "operator" else ["dp_accounting", "scipy"]
    found = f"from importlib.util import find_spec; print([n for n in {foreign} if find_spec(n)])"
    assert run(engine, image, "python3", "-c", found) == (0, "[]\n")


def test_no_module_is_compiled_again_at_each_start(engine, image, role):
    modules = "ssl, asyncio, grpc, numpy, sqlalchemy, coterie.process.runtime"
    if role != "operator":
        modules += f", coterie_{role.replace('-', '_')}.service"
    if role in ENCRYPTING:
        modules += ", coterie.crypto.paillier, gmpy2"
    if role in SUMMING:
        modules += ", coterie.parties.custody, dp_accounting.rdp"
    uncompiled = (
        f"import os, sys, {modules}\n"
        "specs = [getattr(module, '__spec__', None) for module in list(sys.modules.values())]\n"
        "sources = [spec for spec in specs if spec and spec.has_location and spec.origin.endswith('.py')]\n"
        "print(len(sources) > 500, [spec.name for spec in sources if not os.path.exists(spec.cached)])"
    )
    assert run(engine, image, "python3", "-c", uncompiled) == (0, "True []\n")


# --- the same files again ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build(engine, images):
    """Build a stage of the Dockerfile; return the id of its image."""

    def run(target, *options):
        arguments = {name: os.environ.get(name) for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")}
        arguments |= {name: images[name] for name in BASE_IMAGES}
        command = ["docker", "build", "--quiet", "--file", "deploy/Dockerfile", "--target", target, *options]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value or ''}"]
        return engine.run([*command, "."], cwd=ROOT).strip()

    return run


_DIGESTS = """
import hashlib, os, sys
for folder, folders, names in os.walk(sys.argv[1]):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("dev", "proc", "sys")]
    for name in names:
        path = os.path.join(folder, name)
        at, digest = os.lstat(path), hashlib.sha256()
        digest.update(os.readlink(path).encode() if os.path.islink(path) else open(path, "rb").read())
        print(os.path.relpath(path, sys.argv[1]), oct(at.st_mode), at.st_uid, int(at.st_mtime), digest.hexdigest())
"""
"""Prints what there is to say about each file below a folder, but for what a running kernel shows there."""

_OF_THE_ENGINE = {".dockerenv", "etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"}
"""Files that the engine puts into every container when it starts one, also one that only reads an image."""


def test_a_second_installation_gives_the_same_files_with_the_same_times(engine, build):
    again = 'deploy/install-coterie.sh /again >&2 && python3 -c "$0" /staged && echo --- && python3 -c "$0" /again'
    status, said = run(engine, engine.client.images.get(build("coterie")), "sh", "-c", again, _DIGESTS)
    first, _, second = said.partition("---\n")
    assert status == 0, said
    assert len(first.splitlines()) > 200
    assert sorted(second.splitlines()) == sorted(first.splitlines())


def test_files_of_an_image_say_nothing_of_when_it_was_built(engine, image):
    status, said = run(engine, image, "python3", "-c", _DIGESTS, "/opt")
    assert status == 0
    assert len(said.splitlines()) > 1000
    assert {line.split()[-2] for line in said.splitlines()} == {WRITTEN_AT}


def test_an_image_without_kernels_takes_no_compiler_to_build(engine, build, images):
    image = engine.client.images.get(
        build("client", "--build-arg", "KERNELS=no", "--build-arg", f"COMPILER_IMAGE={images['BASE_IMAGE']}")
    )
    assert versions(engine, image)["kernels"] == "not installed"


@pytest.mark.skipif(
    not os.environ.get("COTERIE_REBUILD"), reason="builds everything again: COTERIE_REBUILD=1"
)
def test_a_second_build_of_everything_gives_the_same_files(engine, build):
    ids = [build("data"), build("data", "--no-cache")]
    found = []
    for image in map(engine.client.images.get, ids):
        status, said = run(engine, image, "python3", "-c", _DIGESTS, "/", user="0")
        assert status == 0, said[-300:]
        found.append({line for line in said.splitlines() if line.split()[0] not in _OF_THE_ENGINE})
    assert ids[0] != ids[1]
    assert min(map(len, found)) > 10_000
    assert sorted(found[0] ^ found[1]) == []
