"""deploy/scale.py: overlays for more parties, which compose takes behind the other files."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def scale(*arguments):
    return subprocess.run(
        [sys.executable, "-I", "-S", DEPLOY / "scale.py", *arguments], capture_output=True, text=True
    )


def test_the_overlay_beside_the_compose_file_is_what_the_script_writes():
    assert scale("--hosts", "4").stdout == (DEPLOY / "docker-compose.scale.yml").read_text()


def test_emulators_are_written_for_what_is_added_and_like_those_of_the_others():
    assert scale("--hosts", "4", "--wan").stdout == (DEPLOY / "docker-compose.scale.wan.yml").read_text()
    made = yaml.safe_load(scale("--hosts", "3", "--owners", "5", "--holders", "4", "--wan").stdout)[
        "services"
    ]
    assert list(made) == ["wan-host-2", "wan-owner-3", "wan-owner-4", "wan-key-3"]
    near = yaml.safe_load((DEPLOY / "docker-compose.privmvmf.wan.yml").read_text())["services"]
    assert made["wan-key-3"] == {
        key: yaml.safe_load(str(value).replace("KEY_2", "KEY_3").replace("key-2", "key-3"))
        for key, value in near["wan-key-2"].items()
    }


def test_more_parties_are_started_waited_for_and_given_their_folders():
    made = yaml.safe_load(scale("--hosts", "3", "--owners", "5", "--holders", "4").stdout)
    services, more = made["services"], ["host-2", "owner-3", "owner-4", "key-3"]
    assert list(made["volumes"]) == more
    assert list(services["operator"]["depends_on"]) == more
    assert services["bootstrap"]["volumes"] == [f"{name}:/federation/{name}" for name in more]
    assert services["bootstrap"]["environment"]["COTERIE_ENCRYPTION__HOLDERS"] == "4"
    base = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    privmvmf = yaml.safe_load((DEPLOY / "docker-compose.privmvmf.yml").read_text())["services"]
    for name, like in zip(more, (base["host-1"], *[base["owner-1"]] * 2, privmvmf["key-1"]), strict=True):
        assert services[name]["extends"] == like["extends"]
        assert services[name]["depends_on"] == like["depends_on"]
        assert services[name]["volumes"] == [f"{name}:/party"]
    # Those that another overlay may have set aside work again.
    assert all(services[f"owner-{n}"]["restart"] == "unless-stopped" for n in range(3))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "1"], "--hosts 1: expected 2 to 32"),
        (["--owners", "33"], "--owners 33: expected 3 to 32"),
        (["--holders", "few"], "argument --holders: invalid int value: 'few'"),
        (["--owners", "3", "--wan"], "--wan: no service is added; docker-compose.wan.yml has emulators"),
        ([], "nothing to change: expected --hosts, --owners or --holders"),
    ],
)
def test_what_cannot_be_is_refused_and_named(arguments, said):
    ended = scale(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
