"""The images hold what their role needs and nothing to build or break in with."""

import pytest

pytestmark = pytest.mark.containers

MOST_BYTES = 350_000_000


@pytest.fixture(params=["service", "operator"])
def image(request, engine, images):
    return engine.client.images.get(f"coterie-{request.param}:{images['COTERIE_TAG']}")


def run(engine, image, *command):
    """Run a command in a container of its own and return its status and what it printed."""
    container = engine.client.containers.create(image.id, list(command), entrypoint="", network_mode="none")
    try:
        container.start()
        status = container.wait()["StatusCode"]
        return status, container.logs().decode()
    finally:
        container.remove(force=True)


def test_an_image_is_below_350_megabytes(image):
    assert image.attrs["Size"] < MOST_BYTES


def test_an_image_starts_as_a_user_without_rights(engine, image):
    assert image.attrs["Config"]["User"] == "10001:10001"
    assert run(engine, image, "id", "-u") == (0, "10001\n")


def test_an_image_has_no_compiler_and_no_installer(engine, image):
    look = "command -v sh; for program in cc gcc g++ clang as ld make pip pip3; do command -v $program; done"
    _, found = run(engine, image, "sh", "-c", look)
    assert [path.rpartition("/")[2] for path in found.split()] == ["sh"]  # found, so the search works
    status, _ = run(engine, image, "python3", "-c", "import pip")
    assert status != 0


def test_an_image_has_no_packages_of_other_roles(engine, image, request):
    # phe's licence would be that of whatever it is distributed with.
    foreign = ["torch", "polars", "pytest", "grpc_tools", "phe"]
    foreign.append("matplotlib" if "service" in request.node.name else "gmpy2")
    found = f"from importlib.util import find_spec; print([n for n in {foreign} if find_spec(n)])"
    assert run(engine, image, "python3", "-c", found) == (0, "[]\n")


def test_no_module_is_compiled_again_at_each_start(engine, image, request):
    modules = "ssl, asyncio, grpc, numpy, sqlalchemy, coterie.launch.process, coterie_cos.service"
    if "service" in request.node.name:
        modules += ", coterie.net.custody, coterie_decrypting_client.service, gmpy2"
    uncompiled = (
        f"import os, sys, {modules}\n"
        "specs = [getattr(module, '__spec__', None) for module in list(sys.modules.values())]\n"
        "sources = [spec for spec in specs if spec and spec.has_location and spec.origin.endswith('.py')]\n"
        "print(len(sources) > 500, [spec.name for spec in sources if not os.path.exists(spec.cached)])"
    )
    assert run(engine, image, "python3", "-c", uncompiled) == (0, "True []\n")
