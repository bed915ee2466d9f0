"""Sums under a key that participants share: two holders apply each, and the server sees none but those of metrics."""

import dataclasses
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
from coterie_client.learner import Learner
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.config.run import RunSettings
from coterie.crypto.verification import VerificationError
from coterie.errors import ConfigError, CryptoError
from coterie.parties.shared_model import SharedModels
from coterie.rounds.conductor import Cover, decode_sum
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.secure_sum.key_holder import KeyHolder
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Applied, Declined, Step
from coterie.studies.local_rounds import Holder, Members, run_round
from coterie.studies.run_plan import run_plan
from coterie.systems.registry import server_side
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.intruder import false
from tests.simulation.rig.sums import HOLDERS, SUBJECT, codes_in, halves, held_by_all, identity, key_holder

LAYOUT = Layout((Segment("values", (150,), 1.0, 12), Segment.whole("counts", (5,), 3)))
SERVER, MEMBER = halves("shared-key")


def plan_of(users=(1, 1, 1, 1), number=1, purpose="train", min_sum=1) -> SumPlan:
    members = tuple(Member(identity(n).participant_id, "h", count) for n, count in enumerate(users))
    return SumPlan(
        "run",
        number,
        purpose,
        "shared-key",
        hashlib.sha256(b"a version").digest(),
        layout_hash(LAYOUT),
        members,
        min_sum=min_sum,
        **SERVER().plan_fields(len(users), LAYOUT)._asdict(),
    )


def codes_for(plan, seed=0):
    rng = np.random.default_rng(seed)
    widths = np.repeat([one.bits for one in LAYOUT.segments], [one.size for one in LAYOUT.segments])
    return [
        rng.integers(1, 2**widths, (member.users, LAYOUT.size)).sum(axis=0).astype(np.uint32)
        for member in plan.members
    ]


class Gone:
    def answer(self, plan, step, briefings):
        return ()


class Quits(Holder):
    """Confirms and is gone."""

    def answer(self, plan, step, briefings):
        return () if step is Step.DECRYPT else super().answer(plan, step, briefings)


class Liar(Holder):
    """Makes another model."""

    def answer(self, plan, step, briefings):
        for number, message in super().answer(plan, step, briefings):
            yield number, false(message, number) if step is Step.DECRYPT else message


class Watched(Holder):
    """Remembers what it was asked."""

    asked: tuple = ()

    def answer(self, plan, step, briefings):
        self.asked = (*self.asked, step)
        return super().answer(plan, step, briefings)


def outcome(plan, codes, kinds=(Holder,) * HOLDERS, there=None):
    there = range(len(plan.members)) if there is None else there
    members = Members(MEMBER, lambda plan, asked: [(n, codes[n]) for n in asked if n in there])
    made = {
        f"k{n}": Gone() if kind is Gone else kind(lambda plan, n=n: key_holder(plan, n))
        for n, kind in enumerate(kinds)
    }
    return run_round(plan, LAYOUT, SERVER(), {"h": members, **made}, subject=SUBJECT), made


# --- the sum ---------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    users=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    number=st.integers(1, 9),
    data=st.data(),
)
def test_what_holders_apply_is_the_sum_over_whoever_submitted(users, seed, number, data):
    plan = plan_of(tuple(users), number)
    there = sorted(data.draw(st.sets(st.sampled_from(range(len(users))), min_size=1)))
    codes = codes_for(plan, seed)
    found, _ = outcome(plan, codes, there=there)
    assert found.reason == ""
    assert isinstance(found.total, Applied)
    assert np.array_equal(codes_in(found.total, LAYOUT.size), sum(codes[n] for n in there))


def test_a_sum_that_measures_is_told_to_the_server():
    plan = plan_of(purpose="evaluate")
    codes = codes_for(plan)
    found, _ = outcome(plan, codes)
    assert np.array_equal(found.total, sum(codes))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_holders_apply_a_sum_and_which_goes_round(number):
    plan = plan_of(number=number)
    found, made = outcome(plan, codes_for(plan), (Watched,) * HOLDERS)
    assert found.reason == ""
    asked = {n for n in range(HOLDERS) if Step.DECRYPT in made[f"k{n}"].asked}
    assert asked == {number % HOLDERS, (number + 1) % HOLDERS}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("who", range(HOLDERS))
@pytest.mark.parametrize("kind", [Gone, Quits, Liar])
def test_of_a_holder_that_is_gone_or_lies_another_one_does_the_part(number, who, kind):
    plan = plan_of(number=number)
    codes = codes_for(plan)
    kinds = [kind if n == who else Holder for n in range(HOLDERS)]
    found, _ = outcome(plan, codes, kinds)
    assert np.array_equal(codes_in(found.total, LAYOUT.size), sum(codes))
    # Who was never asked has told no lie.
    asked = {number % HOLDERS, (number + 1) % HOLDERS}
    wrong = {plan.asked_of(one)[0] for one in found.wrong}
    assert wrong == ({who} if kind is Liar and who in asked else set())


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((Gone, Gone, Holder), "1 of 3 key holders confirmed"),
        ((Quits, Quits, Holder), "1 key holders applied the sum; 2 have to come to the same model"),
        ((Liar, Liar, Holder), "3 key holders came to as many models"),
        ((Liar, Quits, Holder), "2 key holders came to as many models"),
    ],
)
def test_without_two_that_agree_the_round_is_abandoned(kinds, words):
    plan = plan_of()
    found, _ = outcome(plan, codes_for(plan), kinds)
    assert found.total is None
    assert words in found.reason


def test_too_few_users_are_never_applied():
    plan = plan_of(min_sum=4)
    found, _ = outcome(plan, codes_for(plan), there=[0, 1, 2])
    assert "the plan's floor is 4" in found.reason


# --- what the server may ask -----------------------------------------------------------------------------------------


class Asked:
    """A sum in progress, as far as a server can take it, with the briefings for its last step."""

    def __init__(self, purpose="train"):
        self.plan = plan_of(purpose=purpose)
        server, codes = SERVER(), codes_for(self.plan)
        running = server.begin(self.plan, LAYOUT)
        notes = {}
        for n, one in enumerate(codes):
            message = MEMBER(self.plan, n).answer(Step.SUBMIT, b"", one)
            vector = server.vector(self.plan, {}, notes, n, message, LAYOUT)
            running, notes[n] = server.added(running, vector), vector.note
        closed = {Step.SUBMIT: notes}
        shown = server.pieces(self.plan, closed, Step.CONFIRM, 4, running).whole
        self.halves = [key_holder(self.plan, n) for n in range(HOLDERS)]
        signed = [one.confirm(shown) for one in self.halves]
        self.agreed = signed[0].agreed
        closed[Step.CONFIRM] = {self.plan.respondent(n, n): one.message for n, one in enumerate(signed)}
        self.server, self.closed, self.running, self.codes = server, closed, running, codes
        self.total = sum(codes)

    def briefing(self, holder=0):
        number = self.plan.respondent(holder, holder)
        return self.server.pieces(self.plan, self.closed, Step.DECRYPT, number, self.running, SUBJECT).whole


def test_a_holder_decrypts_no_sum_for_the_server_that_does_more_than_measure():
    asked = Asked()
    for holder in range(HOLDERS):
        answer = asked.halves[holder].decrypt(asked.briefing(holder), asked.agreed)
        # What leaves is a model and what shows that another holder came to the same one.
        assert not wire.Decryption.FromString(answer).plaintexts
        assert wire.AppliedSum.FromString(answer).agreement


def test_the_holder_of_an_encrypted_sum_would_have_told():
    # The same briefing, and nobody who looks at what the sum is for.
    asked = Asked(purpose="evaluate")
    plain = KeyHolder.decrypt(asked.halves[0], asked.briefing(), asked.agreed)
    assert wire.Decryption.FromString(plain).plaintexts


@pytest.mark.parametrize(
    "change",
    [
        lambda task: task.members.pop(),
        lambda task: task.confirmations.pop() and task.confirmations.pop(),
        lambda task: setattr(task, "ciphertexts", task.ciphertexts[::-1]),
        lambda task: setattr(task, "ciphertexts", task.ciphertexts[256:] + task.ciphertexts[:256]),
        lambda task: setattr(task, "mode", 9),
    ],
)
def test_what_is_not_the_sum_over_those_that_confirmed_is_not_applied(change):
    asked = Asked()
    task = wire.ApplyTask.FromString(asked.briefing())
    change(task)
    with pytest.raises(Declined):
        asked.halves[0].decrypt(task.SerializeToString(), asked.agreed)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer, model: setattr(model, "round", 2),
        lambda answer, model: setattr(model, "key_id", bytes(32)),
        lambda answer, model: setattr(answer, "agreement", b"short"),
        lambda answer, model: answer.measured.add(name="m", total=float("nan"), count=1),
    ],
)
def test_an_answer_that_is_no_version_of_this_round_is_refused(change):
    asked = Asked()
    answer = wire.AppliedSum.FromString(asked.halves[0].decrypt(asked.briefing(), asked.agreed))
    number = asked.plan.respondent(0, 0)
    asked.server.check(asked.plan, asked.closed, Step.DECRYPT, number, answer.SerializeToString())
    model = wire.SealedModel.FromString(answer.model)
    change(answer, model)
    answer.model = model.SerializeToString()
    with pytest.raises(Refusal):
        asked.server.check(asked.plan, asked.closed, Step.DECRYPT, number, answer.SerializeToString())
    with pytest.raises(Refusal):
        asked.server.check(asked.plan, asked.closed, Step.DECRYPT, number, b"\xff")


# --- versions --------------------------------------------------------------------------------------------------------

ITEMS = 30
RUN = run_plan(
    RunSettings.model_validate({"system": "fedncf", "secure_sum": "shared-key", "federation": {"hosts": 3}}),
    run_id="run",
    seed=3,
)
MODELS = SharedModels(RUN, lambda key_id: held_by_all())
SIDE = server_side(RUN.system, RUN.settings, ITEMS, RUN.seed, 2)


def training(purpose=Purpose.SUPPORTS, model=b"", **changes):
    """Return the plan of a sum, the task of its holders and a sum that users can have contributed."""
    layout = SIDE.layout(purpose)
    members = tuple(Member(identity(n).participant_id, "h", 1) for n in range(4))
    plan = SumPlan(
        "run",
        1,
        purpose.value,
        "shared-key",
        hashlib.sha256(model).digest(),
        layout_hash(layout),
        members,
        key_id=held_by_all().key_id,
        code_bits=1,
    )
    task = wire.ApplyTask(model=model, items=ITEMS, shares=[1.0, 0.0], population=8)
    contribution = Contribution(layout)
    for user in range(4):
        contribution.count()
        if purpose is Purpose.SUPPORTS:
            own = np.arange(user, ITEMS)
            contribution.add("supports", np.ones(len(own)), np.random.default_rng(0), rows=own)
    # Slots behind the last value are empty.
    codes = np.concatenate([contribution.codes(), np.zeros(12, np.uint32)])
    return dataclasses.replace(plan, **changes), task, codes


def test_a_version_is_what_a_server_would_have_made_of_the_sum():
    plan, task, codes = training()
    made = MODELS.applied(plan, task, codes, 4)
    assert made.agreement == MODELS.applied(plan, task, codes, 4).agreement
    assert made.model != MODELS.applied(plan, task, codes, 4).model
    found, made_in = MODELS.opened(made.model, ITEMS, 2)
    assert made_in == plan.round
    cover = Cover(Purpose.SUPPORTS, 4, 4, 8, np.array([1.0, 0.0]), pass_number=0, part=0)
    expected = SIDE.apply(SIDE.initial(), decode_sum(SIDE, codes[:ITEMS], cover))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert found["supports"][0].tolist() == [1, 2, 3, *[4] * (ITEMS - 3)]
    # The next sum goes on from there.
    after, told, codes = training(model=made.model, round=2, part=1)
    second, _ = MODELS.opened(MODELS.applied(after, told, codes, 4).model, ITEMS, 2)
    assert second["supports"].any(axis=1).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_sha256": bytes(32)}, "another model than that of the plan"),
        ({"layout_sha256": bytes(32)}, "layout of the sum is not the one"),
    ],
)
def test_a_sum_is_applied_to_what_its_plan_names_and_to_nothing_else(change, words):
    plan, task, codes = training(**change)
    with pytest.raises(Declined, match=words):
        MODELS.applied(plan, task, codes, 4)


def test_a_sum_that_no_users_can_have_contributed_is_not_applied():
    plan, task, codes = training()
    codes[0] = 2**20
    with pytest.raises(Declined):
        MODELS.applied(plan, task, codes, 4)
    plan, task, codes = training()
    codes[-1] = 1
    with pytest.raises(Declined, match="another length"):
        MODELS.applied(plan, task, codes, 4)


def test_holders_that_were_told_different_things_do_not_agree():
    plan, task, codes = training()
    first = MODELS.applied(plan, task, codes, 4).agreement
    task.population = 9
    assert MODELS.applied(plan, task, codes, 4).agreement != first


def test_a_version_that_is_none_or_under_a_key_that_is_not_held_does_not_open():
    def not_held(key_id):
        raise CryptoError("not held")

    with pytest.raises(VerificationError):
        MODELS.opened(b"\xff", ITEMS, 1)
    with pytest.raises(VerificationError):
        MODELS.opened(
            wire.SealedModel(key_id=bytes(32), round=1, sealed=bytes(60)).SerializeToString(), ITEMS, 1
        )
    plan, task, codes = training()
    made = MODELS.applied(plan, task, codes, 4)
    with pytest.raises(CryptoError, match="not held"):
        SharedModels(RUN, not_held).opened(made.model, ITEMS, 1)


def test_a_host_without_the_key_takes_no_part_and_says_what_it_lacks(tmp_path):
    host = SimpleNamespace(
        party=SimpleNamespace(plan=RUN), settings=SimpleNamespace(state=tmp_path), custody=None
    )
    with pytest.raises(ConfigError, match="share its key, and this host does not hold it") as caught:
        Learner(host, None)
    assert "encryption.holds_key" in (caught.value.hint or "")
