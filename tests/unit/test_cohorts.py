"""The rounds of a run's plan, whether the users can fill them, and what is said about what they protect."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given as sampled
from hypothesis import strategies as st

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.rounds import policy
from coterie.rounds.policy import CohortRule
from coterie.rounds.training import Purpose
from coterie.studies.protection import fragile, protection, require_cohorts, require_pads
from coterie.studies.run_plan import rounds_plan, run_plan
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.server_step import planned_server_side
from coterie.wire.v1.orchestrator_pb2 import CohortKind

ROUNDS = {
    "redraw": 0,
    "most_users": 0,
    "channel_rounds": 0,
    "cohorts": "random",
    "cohort": 31,
    "group": 32,
    "passes": 33,
    "evaluate_every": 34,
    "patience": 35,
    "choose_by": "validation_ndcg@10",
    "min_cohort": 21,
    "min_sum": 22,
    "step_timeout_s": 1.5,
    "experiment": True,
    "party_per_user": True,
    "server_optimiser": {"name": "none"},
}


LOW = {"cohort": 2, "group": 2, "min_cohort": 1, "min_sum": 1, "cohorts": "all"}


def settings(**given: Any) -> RunSettings:
    return RunSettings.model_validate({"system": "fedncf", **given})


def test_the_plan_carries_every_key_of_the_rounds() -> None:
    made = rounds_plan(settings(rounds=ROUNDS).rounds, 0)
    assert made.cohorts == CohortKind.COHORT_KIND_RANDOM
    assert made.step_timeout_ms == 1500
    assert not made.HasField("server_optimiser")
    others = ROUNDS.keys() - {"cohorts", "step_timeout_s", "server_optimiser"}
    assert {name: getattr(made, name) for name in others} == {name: ROUNDS[name] for name in others}
    # What is fitted is in the plan, as the group and the cohort that were found; `test_norm_bound` and `test_privacy`
    # have the tables of aggregation and privacy; an open population has tests of its own below.
    assert set(ROUNDS) | {"fit_groups", "aggregation", "privacy", "most_users"} == set(
        RunSettings().rounds.model_fields_set | type(RunSettings().rounds).model_fields.keys()
    )


def test_what_a_rule_sees_and_what_a_bound_does_not_hold_against_is_warned_of() -> None:
    def warned(secure_sum: str, **aggregation: Any) -> list[str]:
        made = settings(secure_sum=secure_sum, rounds={"party_per_user": True, "aggregation": aggregation})
        return protection(made, [149, 150])["warnings"]

    assert any("'median' needs single contributions" in one for one in warned("clear", rule="median"))
    assert any("one that lies can ignore it" in one for one in warned("masked", norm_bound=1.0))
    assert not any("norm_bound" in one or "single contributions" in one for one in warned("masked"))


def test_the_beacon_is_a_function_of_the_seed_alone() -> None:
    rounds = settings().rounds
    first = rounds_plan(rounds, 0).beacon
    assert len(first) == 32
    assert rounds_plan(settings(rounds=ROUNDS).rounds, 0).beacon == first
    assert rounds_plan(rounds, 1).beacon != first


def test_outside_experiments_the_beacon_is_left_to_the_third_party() -> None:
    given = settings(rounds={"experiment": False, "min_cohort": 2}, federation={"hosts": 2}).rounds
    assert rounds_plan(given, 0).beacon == b""


def test_groups_that_are_drawn_anew_too_often_are_refused_outside_experiments() -> None:
    few = {"experiment": False, "min_cohort": 2}
    for redraw in (0, 50, 300):
        rounds = settings(rounds={**few, "redraw": redraw}, federation={"hosts": 2}).rounds
        assert rounds_plan(rounds, 0).redraw == redraw
    for redraw in (1, 49):
        with pytest.raises(ValueError, match=f"redraw {redraw} is below 50"):
            settings(rounds={**few, "redraw": redraw}, federation={"hosts": 2})
        assert settings(rounds={"redraw": redraw}).rounds.redraw == redraw
    with pytest.raises(ValueError, match="no groups to draw anew"):
        settings(rounds={"cohorts": "random", "redraw": 50})


def test_the_plan_of_a_run_in_rounds_carries_the_learning_as_its_peers_read_it() -> None:
    given = settings(
        secure_sum="masked", rounds={"party_per_user": True}, fedncf={"model": "mlp", "min_touch": 7}
    )
    plan = run_plan(given, run_id="a-run", seed=5)
    assert (plan.system, plan.form, plan.secure_sum, plan.seed) == ("fedncf", "users", "masked", 5)
    assert FedNcfSettings.from_json(plan.settings) == given.fedncf
    assert plan.rounds == rounds_plan(given.rounds, 5)
    assert plan.dim == plan.theta == plan.epochs == 0


def test_the_plan_of_drift_has_no_rounds() -> None:
    plan = run_plan(RunSettings(), run_id="a-run", seed=5)
    assert not plan.HasField("rounds")
    assert not plan.settings
    assert (plan.form, plan.dim, plan.epochs) == ("published", 16, 8)


def test_users_who_cannot_fill_a_cohort_are_refused() -> None:
    require_cohorts(settings(), 20)
    with pytest.raises(ConfigError, match="a cohort has 19 of 19 users"):
        require_cohorts(settings(), 19)


def test_a_cohort_that_would_overflow_the_sum_is_refused() -> None:
    everybody = settings(rounds={"cohorts": "all"}, fedncf={"bits": 24})
    require_cohorts(everybody, 256)
    with pytest.raises(ConfigError, match="room for 256"):
        require_cohorts(everybody, 257)


def test_an_encrypted_sum_of_more_ciphertexts_than_key_holders_compute_pads_for_is_refused() -> None:
    pytest.importorskip("gmpy2")
    encrypted = RunSettings.model_validate(
        {
            "system": "fcf",
            "secure_sum": "encrypted",
            "fcf": {"factors": 64},
            "encryption": {"bits": 1024, "comparison": True},
            "rounds": {"cohort": 150, "group": 150, "min_cohort": 130, "min_sum": 130},
        }
    )
    require_pads(encrypted, 150, 10_000)
    with pytest.raises(
        ConfigError, match=r"168,422 ciphertexts, and key holders compute pads for 131,072"
    ) as raised:
        require_pads(encrypted, 150, 100_000)
    assert raised.value.hint.startswith("encryption.bits 2048, fewer fcf.bits, ")
    longer = encrypted.encryption.model_copy(update={"bits": 2048})
    require_pads(encrypted.model_copy(update={"encryption": longer}), 150, 100_000)
    require_pads(encrypted.model_copy(update={"secure_sum": "clear"}), 150, 100_000)


def test_the_report_says_that_a_clear_sum_shows_each_partys_contribution() -> None:
    hosts = protection(settings(), [150, 150])
    assert (hosts["sum"], hosts["parties"]) == ("clear", "hosts")
    assert "each host in clear" in hosts["says"]
    assert "devices" not in hosts
    assert hosts["warnings"] == []
    assert "each user in clear" in protection(settings(rounds={"party_per_user": True}), [300])["says"]


def test_the_report_says_how_many_devices_a_masked_sum_withstands() -> None:
    masked = protection(settings(secure_sum="masked"), [150, 0, 150])
    assert "no contribution of a single host" in masked["says"]
    assert masked["devices"] == {"count": 2, "curious": 0, "lost": 0}
    many = protection(settings(secure_sum="masked", federation={"hosts": 40}), [30] * 40)
    assert many["devices"]["count"] == 40
    assert many["devices"]["curious"] > 0
    assert many["devices"]["lost"] > 0


@pytest.mark.parametrize(
    ("given", "devices", "said"),
    [
        ({}, [20] * 6, "over 6 client hosts bears no dropout"),
        ({}, [20, 0, 20], "over 2 client hosts bears no dropout"),
        ({}, [20] * 7, ""),
        ({"rounds": {"party_per_user": True, **LOW}}, [3, 2], "over 5 users bears no dropout"),
        ({"rounds": {"party_per_user": True}}, [20, 20], ""),
    ],
)
def test_a_masked_sum_in_which_nobody_may_be_lost_is_a_warning_that_names_the_number(
    given: dict[str, Any], devices: list[int], said: str
) -> None:
    masked = settings(secure_sum="masked", **given)
    warnings = fragile(masked, devices)
    assert bool(warnings) == bool(said)
    assert all(said in one and "From 7 members on" in one for one in warnings)
    assert set(warnings) <= set(protection(masked, devices)["warnings"])
    assert fragile(settings(**given), devices) == []


def test_windows_say_how_many_owners_and_hosts_may_not_be_lost() -> None:
    drift = {"form": "shielded"}
    given = {
        "system": "drift",
        "drift": drift,
        "secure_sum": "masked",
        "federation": {"owners": 4, "hosts": 3},
    }
    shielded = RunSettings.model_validate(given)
    hosts, owners = fragile(shielded, [10, 10, 10])
    assert "over 3 client hosts bears no dropout" in hosts
    assert "over 4 data owners bears no dropout" in owners
    assert {hosts, owners} <= set(protection(shielded, [10, 10, 10])["warnings"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": {"cohorts": "random"}}, "Random cohorts"),
        ({"rounds": {"cohorts": "random"}}, "touch = once asks groups"),
        ({"fedncf": {"touch": "exact"}}, "Exact counts"),
        ({"rounds": {"cohorts": "random"}, "fedncf": {"touch": "exact"}}, "give every user's items away"),
        ({"fedncf": {"aggregation": "simple"}}, "its row is that user's"),
        ({"rounds": {"cohorts": "random", "cohort": 45, "min_cohort": 40}}, "1 of the 7 cohorts of a pass"),
        ({"secure_sum": "masked"}, "An experiment"),
    ],
)
def test_what_a_setting_gives_away_is_a_warning(given: dict[str, Any], words: str) -> None:
    warnings = protection(settings(**given), [149, 150])["warnings"]
    assert any(words in one for one in warnings), warnings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": {"cohorts": "random"}}, "an item that enough users of a group have rated"),
        ({"mvmf": {"preset": "paper", "min_touch": 2}}, "of two users each would know the other's part"),
        ({"mvmf": {"preset": "paper", "resample": True}}, "knows what it has rated"),
        ({"mvmf": {"weights": "obs-only"}}, "rows of rated items only"),
        (
            {
                "rounds": {"cohorts": "groups", "group": 30, "cohort": 30},
                "mvmf": {"biases": False, "factors": 12},
            },
            "Sums over 22 users, and fewer than 24",
        ),
    ],
)
def test_what_a_setting_of_fedmvmf_gives_away_is_a_warning(given: dict[str, Any], words: str) -> None:
    asked = RunSettings.model_validate({"system": "fedmvmf", **given})
    warnings = protection(asked, [149, 150])["warnings"]
    assert any(words in one for one in warnings), warnings
    for usual in ({"mvmf": {"preset": "paper"}}, {"secure_sum": "masked", "federation": {"hosts": 3}}):
        told = protection(RunSettings.model_validate({"system": "fedmvmf", **usual}), [149, 150])["warnings"]
        assert not any(words in one for one in told), told


def test_a_cohort_of_fedmvmf_that_would_overflow_is_refused() -> None:
    asked = RunSettings.model_validate({"system": "fedmvmf", "mvmf": {"bits": 27}})
    with pytest.raises(ConfigError, match="there is room for 32") as caught:
        require_cohorts(asked, 100)
    assert caught.value.hint == (
        "codes of 25 bits at most (fewer mvmf.bits); cohorts of at most 32 users; or a data set of so few"
    )


def a_million(**own: int) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "fedncf",
            "secure_sum": "masked",
            "fedncf": {"touch": "exact", **own},
            "rounds": {"cohorts": "all"},
        }
    )


@pytest.mark.parametrize("own", [{}, {"bits": 12}, {"metric_bits": 12}, {"bits": 12, "metric_bits": 12}])
def test_codes_that_do_not_hold_a_population_are_refused_with_three_ways_out(own: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a cohort of 1000000 users would overflow") as caught:
        require_cohorts(a_million(**own), 1_000_000)
    ways = caught.value.hint.split("; ")
    assert ways[0].startswith("codes of 12 bits at most (fewer fedncf.bits and fedncf.metric_bits")
    assert ways[1].startswith("cohorts of at most ")
    assert ways[2] == "or a data set of so few"


def test_codes_of_twelve_bits_hold_a_million_users_in_training_and_in_metrics() -> None:
    asked = a_million(bits=12, metric_bits=12, n_cap=2047)
    require_cohorts(asked, 1_000_000)
    side = planned_server_side(run_plan(asked, run_id="million", seed=0), 20, 1)
    for purpose in (Purpose.TRAIN, Purpose.EVALUATE):
        side.layout(purpose).require_capacity(1_000_000)


def test_metrics_of_all_users_of_hosts_must_fit_though_cohorts_are_small() -> None:
    few: dict[str, Any] = {"cohorts": "random", "cohort": 500}
    own: dict[str, Any] = {"system": "fedncf", "fedncf": {"touch": "exact"}}
    asked = RunSettings.model_validate({**own, "rounds": few})
    require_cohorts(asked, 65_537)
    with pytest.raises(ConfigError, match="metrics over 65538 users would overflow") as caught:
        require_cohorts(asked, 65_538)
    assert "codes of 15 bits at most (" in caught.value.hint
    alone = RunSettings.model_validate({**own, "rounds": {**few, "party_per_user": True}})
    require_cohorts(alone, 65_538)


def test_sums_that_may_be_solved_are_refused_where_a_key_is_held() -> None:
    given = {"system": "fedmvmf", "rounds": {"cohorts": "groups", "group": 30, "cohort": 30}}
    for factors, refused in ((10, False), (11, True)):
        mvmf = {"biases": False, "factors": factors}
        asked = RunSettings.model_validate({**given, "mvmf": mvmf, "secure_sum": "encrypted"})
        if refused:
            with pytest.raises(ConfigError, match="decrypt none over fewer than 22"):
                require_cohorts(asked, 300)
        else:
            require_cohorts(asked, 300)
        # Under masks there is nobody who could refuse: it is a warning.
        require_cohorts(asked.model_copy(update={"secure_sum": "masked"}), 300)


@pytest.mark.parametrize(
    ("secure_sum", "who"), [("encrypted", "4 decrypting clients"), ("shared-key", "3 hosts")]
)
def test_what_sparse_contributions_show_is_a_warning(secure_sum: str, who: str) -> None:
    given = {
        "system": "fedmf",
        "split": {"kind": "random"},
        "federation": {"hosts": 3},
        "fedmf": {"min_touch": 20},
        "encryption": {"sparse": True, "holders": 4},
    }
    asked = RunSettings.model_validate({**given, "secure_sum": secure_sum})
    plan = run_plan(asked, run_id="a-run", seed=5)
    assert plan.rounds.sparse
    (warning,) = (one for one in protection(asked, [50] * 3)["warnings"] if "sparse" in one)
    assert who in warning
    assert "near which items each host" in warning
    clear = RunSettings.model_validate({**given, "secure_sum": "clear"})
    assert not run_plan(clear, run_id="a-run", seed=5).rounds.sparse


def test_of_a_shared_key_the_hosts_are_those_who_may_not_be_lost() -> None:
    # What is set for decrypting clients and for contributors without the key says nothing here.
    others = {"holders": 1, "obfuscators": "short"}
    for hosts, words in (
        (2, ["2 hosts that share the key: where one is lost, nothing is decrypted."]),
        (3, []),
    ):
        asked = settings(secure_sum="shared-key", encryption=others, federation={"hosts": hosts})
        warnings = [
            one for one in protection(asked, [50] * hosts)["warnings"] if "lost" in one or "assumption" in one
        ]
        assert [one.partition(" 3 tolerate")[0] for one in warnings] == words


def test_a_system_whose_metrics_take_sixteen_bits_is_refused_for_them() -> None:
    given = {"system": "fedmvmf", "mvmf": {"bits": 12}, "rounds": {"cohorts": "random", "cohort": 500}}
    with pytest.raises(
        ConfigError, match="metrics over 100000 users would overflow: there is room for 65537"
    ):
        require_cohorts(RunSettings.model_validate(given), 100_000)


# --- users who come later


OPEN: dict[str, Any] = {"experiment": False, "min_cohort": 2, "min_sum": 2, "group": 2, "most_users": 300}


def test_the_plan_says_how_many_users_may_ever_come() -> None:
    given = settings(rounds=OPEN, secure_sum="masked", federation={"hosts": 2})
    assert run_plan(given, run_id="a-run", seed=0).rounds.most_users == 300
    assert run_plan(settings(), run_id="a-run", seed=0).rounds.most_users == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": {**OPEN, "experiment": True}}, "does not in an experiment"),
        ({"rounds": {**OPEN, "redraw": 50}}, "groups are drawn anew after 50 passes"),
        ({"rounds": {**OPEN, "cohorts": "random"}}, "expected cohorts of groups, or all"),
        ({"secure_sum": "encrypted"}, "expected clear or masked"),
        ({"secure_sum": "shared-key"}, "expected clear or masked"),
        (
            {"secure_sum": "masked", "rounds": {**OPEN, "privacy": {"place": "local", "noise": 1.0}}},
            "what a user's privacy costs",
        ),
        ({"system": "drift"}, "system 'drift': its users are fixed when a run begins"),
        ({"system": "fedgnn"}, "its users are fixed when a run begins; expected 0, or one of"),
    ],
    ids=["experiment", "redraw", "random", "encrypted", "shared-key", "privacy", "drift", "fedgnn"],
)
def test_an_open_population_is_refused_where_something_depends_on_who_the_users_are(
    changes: dict[str, Any], words: str
) -> None:
    given = {"system": "fedncf", "rounds": OPEN, "federation": {"hosts": 2}, "encryption": {"bits": 3072}}
    if changes.get("system"):
        given.pop("encryption")
    with pytest.raises(ValueError, match=words) as refused:
        RunSettings.model_validate({**given, **changes})
    assert "rounds.most_users 300" in str(refused.value)


def test_sums_have_to_hold_the_largest_cohort_to_which_a_population_may_grow() -> None:
    """Groups of 60 to 119 users: a cohort of 100 has two groups if the smallest is below 100, the last one three."""
    rounds = {**OPEN, "cohorts": "groups", "group": 60, "cohort": 100, "most_users": 100_000}
    given = settings(rounds=rounds, fedncf={"bits": 24}, federation={"hosts": 2})
    with pytest.raises(ConfigError, match="a cohort of 357 users would overflow: there is room for 256"):
        require_cohorts(given, 120)
    # A beginning of fewer users than a group makes cohorts of more groups.
    rule = CohortRule("groups", 100, 60, b"")
    assert [policy.largest_cohort(rule, 100_000, fewest) for fewest in (120, 60, 30, 0)] == [
        357,
        357,
        833,
        23681,
    ]
    assert policy.largest_cohort(rule, 200, 120) == 200


@sampled(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 30),
    st.lists(st.integers(0, 30), max_size=6),
    st.integers(0, 3),
)
def test_no_cohort_of_a_population_that_grows_is_larger_than_foreseen(
    group: int, size: int, beginning: int, waves: list[int], number: int
) -> None:
    starts = list(itertools.accumulate([0, beginning, *(group + more for more in waves)]))
    *firsts, users = starts
    rule = CohortRule(
        "groups", size, group, b"", waves=tuple((first, bytes([first % 256])) for first in firsts)
    )
    foreseen = policy.largest_cohort(rule, users, beginning)
    assert max(len(cohort) for cohort in policy.cohorts(rule, users, number)) <= foreseen


@sampled(
    st.sampled_from(["groups", "random", "independent", "all"]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 30),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_groups_and_cohorts_are_counted_without_being_drawn(
    kind: policy.Cohorts, group: int, size: int, beginning: int, waves: list[int]
) -> None:
    *firsts, users = itertools.accumulate([0, beginning, *(group + more for more in waves)])
    starts = tuple((first, bytes([first % 256])) for first in firsts) if waves else ()
    rule = CohortRule(kind, size, group, b"", waves=starts)
    drawn = len(policy.groups(rule, users)), len(policy.cohorts(rule, users, 0))
    assert policy.numbers(rule, users) == drawn


def test_a_wave_draws_its_own_groups_only_and_they_are_those_of_a_host_that_draws_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "_drawn", OrderedDict())
    sizes: list[int] = []
    permuted = policy._permutation

    def counted(beacon: bytes, purpose: str, number: int, count: int) -> Any:
        sizes.append(count)
        return permuted(beacon, purpose, number, count)

    monkeypatch.setattr(policy, "_permutation", counted)
    parts = ((0, b"a"), (100, b"b"), (107, b"c"))
    policy.groups(CohortRule("groups", 20, 5, b"a"), 100)
    once = policy.groups(CohortRule("groups", 20, 5, b"b", waves=parts[:2]), 107)
    rule = CohortRule("groups", 20, 5, b"c", waves=parts)
    twice = policy.groups(rule, 112)
    assert sizes == [100, 7, 5]
    assert all(one is two for one, two in zip(once, twice, strict=False))
    policy._drawn.clear()
    assert [one.tolist() for one in policy.groups(rule, 112)] == [one.tolist() for one in twice]
    assert sizes == [100, 7, 5, 100, 7, 5]


def test_sums_have_to_hold_all_users_who_may_come() -> None:
    def opened(most: int) -> RunSettings:
        rounds = {**OPEN, "cohorts": "all", "most_users": most}
        return settings(rounds=rounds, fedncf={"bits": 24}, federation={"hosts": 2})

    require_cohorts(opened(256), 100)
    with pytest.raises(ConfigError, match="a cohort of 257 users would overflow: there is room for 256"):
        require_cohorts(opened(257), 100)
