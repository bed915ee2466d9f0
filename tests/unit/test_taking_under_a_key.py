"""Sums under a key through intakes: they check and multiply ciphertexts, and the coordinator joins their products."""

import asyncio
import sys
import threading

import numpy as np
import pytest

from coterie.secure_sum.encrypted import EncryptedServer
from coterie.secure_sum.protocol import Step
from coterie.store import contributions
from coterie.store.postgres import DatabaseAddress
from coterie.studies.local_rounds import Holder
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2
from tests.simulation.rig.sums import HOLDERS, held_by_all, key_holder

from .. import postgres
from .test_sums import MEMBERS, PARTIES, SOON_S
from .test_taking import Parted, possible_codes

N = int(held_by_all().public.n)
HEADER, WIDTH = 44, held_by_all().public.modulus_bytes


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Keyed(Parted):
    """A round under a key at a coordinator whose members come through two intakes."""

    def __init__(self, folder, at, secure_sum):
        super().__init__(folder, at, secure_sum)
        self.holders = {n: Holder(lambda plan, n=n: key_holder(plan, n)) for n in range(HOLDERS)}

    def covered(self):
        found = super().covered()
        for holder in range(HOLDERS):
            for number in self.plan.numbers_of(self.plan.respondent(holder, holder)):
                found[number] = [MEMBERS + holder]
        return found

    def drawn(self, rng):
        return possible_codes(rng, self.layout)

    def contributions(self):
        return [self.members[n].answer(Step.SUBMIT, b"", self.codes[n]) for n in range(MEMBERS)]

    async def decrypted(self):
        """Let key holders confirm and decrypt; return the sum."""
        for step in (Step.CONFIRM, Step.DECRYPT):
            await self.reached(step)
            for holder, one in self.holders.items():
                briefings = self.briefings(step, [f"k{holder}"])
                for number, message in one.answer(self.plan, step, briefings):
                    self.submit(step, number, message)
                assert one.sat_out == ""
        return await self.total()


@pytest.fixture
async def keyed(tmp_path, server, request):
    at = DatabaseAddress(**server.keys(server.database()))
    one = Keyed(tmp_path, at, getattr(request, "param", "encrypted"))
    await one.reached(Step.SUBMIT)
    yield one
    for intake in one.intakes:
        intake.close()
    one.sums.end()
    await asyncio.gather(one.worker, return_exceptions=True)
    one.writer.close()


async def test_ciphertexts_that_come_twice_through_two_intakes_count_once_and_are_decrypted(keyed):
    messages = keyed.contributions()
    both = [(intake, member) for member in range(MEMBERS - 1) for intake in (0, 1)]
    assert all(await asyncio.gather(*(keyed.send(intake, one, messages[one]) for intake, one in both)))
    await keyed.sums.gather()
    # The next coordinator, and the other intake, go on with what was acknowledged.
    keyed.restart()
    await keyed.sums.gather()
    assert keyed.open.state.asked == (MEMBERS - 1,)
    assert await keyed.send(0, MEMBERS - 1, messages[MEMBERS - 1])
    with keyed.engine.connect() as connection:
        parts = contributions.read_parts(connection, "run", 1, ())
    assert 1 < len(parts) < MEMBERS
    assert sorted(member for part in parts for member in part.notes) == list(range(MEMBERS))
    await keyed.sums.gather()
    assert np.array_equal(await keyed.decrypted(), keyed.clear)
    with keyed.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM intake_parts").scalar_one() == 0


async def test_no_more_bytes_are_written_together_than_a_transaction_has_time_for(keyed, monkeypatch):
    messages = keyed.contributions()
    monkeypatch.setattr("coterie_cos.taking._BATCH_BYTES", 2 * len(messages[0]))
    assert all(await asyncio.gather(*(keyed.send(0, one, messages[one]) for one in range(MEMBERS))))
    with keyed.engine.connect() as connection:
        parts = contributions.read_parts(connection, "run", 1, ())
    assert [len(part.notes) for part in sorted(parts, key=lambda one: min(one.notes))] == [2, 2, 2]
    await keyed.sums.gather()
    assert np.array_equal(await keyed.decrypted(), keyed.clear)


async def test_a_sum_can_be_closed_while_an_intake_multiplies(keyed, monkeypatch):
    messages, counts, summed = keyed.contributions(), [], EncryptedServer.summed

    def while_free(half, plan, layout, addends):
        addends = list(addends)
        counts.append(len(addends))
        with keyed.engine.connect() as connection:
            # Fails where somebody keeps the row.
            connection.exec_driver_sql("SELECT 1 FROM intake_sums FOR UPDATE NOWAIT")
        return summed(half, plan, layout, addends)

    monkeypatch.setattr(EncryptedServer, "summed", while_free)
    assert all(await asyncio.gather(*(keyed.send(0, one, messages[one]) for one in range(MEMBERS))))
    assert sum(counts) == MEMBERS
    await keyed.sums.gather()
    monkeypatch.undo()
    assert np.array_equal(await keyed.decrypted(), keyed.clear)


async def test_a_coordinator_answers_while_it_multiplies_the_ciphertexts_of_all_parts(keyed, monkeypatch):
    messages, said, waited = keyed.contributions(), threading.Event(), []
    for member in range(MEMBERS):
        assert await keyed.send(0, member, messages[member])
    read = EncryptedServer.from_bytes

    def waits(*of):
        waited.append(said.wait(10.0))
        return read(*of)

    monkeypatch.setattr(EncryptedServer, "from_bytes", waits)
    gathering = asyncio.create_task(keyed.sums.gather())
    # The event loop's next turns; one that multiplies itself would not come to this.
    asyncio.get_running_loop().call_later(0.2, said.set)
    await gathering
    assert waited
    assert all(waited)
    assert np.array_equal(await keyed.decrypted(), keyed.clear)


@pytest.mark.parametrize("keyed", ["encrypted", "shared-key"], indirect=True)
async def test_the_sum_that_is_decrypted_is_the_product_that_one_process_forms(keyed):
    messages, half, plan = keyed.contributions(), keyed.server(), keyed.plan
    alone = half.begin(plan, keyed.layout)
    for member, message in enumerate(messages):
        alone = half.added(alone, half.vector(plan, {}, {}, member, message, keyed.layout))
    for member in range(MEMBERS):
        assert await keyed.send(member % 2, member, messages[member])
    await keyed.sums.gather()
    await keyed.reached(Step.CONFIRM)
    assert half.to_bytes(keyed.open.state.running) == half.to_bytes(alone)


def forged(message, place, number):
    """Return a contribution with another number at a place among its units and shifts."""
    content = bytearray(rounds_pb2.SummedVector.FromString(message).ciphertexts)
    content[HEADER + WIDTH * place : HEADER + WIDTH * (place + 1)] = number.to_bytes(WIDTH)
    return rounds_pb2.SummedVector(ciphertexts=bytes(content)).SerializeToString()


async def test_an_intake_refuses_ciphertexts_out_of_range_in_the_coordinators_words(keyed):
    message, half = keyed.contributions()[3], keyed.server()
    factor = int(held_by_all().secret.factors[0].prime)
    for place, number in ((0, N), (1, N), (0, 0), (0, factor)):
        bad = forged(message, place, number)
        with pytest.raises(Refusal) as said:
            half.vector(keyed.plan, {}, {}, 3, bad, keyed.layout)
        with pytest.raises(Refusal) as refused:
            await keyed.send(0, 3, bad)
        assert refused.value.reason == said.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
        assert (refused.value.message, refused.value.field) == (said.value.message, said.value.field)
    # Of somebody else's slots nothing is taken either.
    with pytest.raises(Refusal) as refused:
        await keyed.send(1, 3, message, PARTIES[0])
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
    with keyed.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM intake_senders").scalar_one() == 0


async def test_an_intake_without_gmpy2_says_what_it_needs_and_has_contributions_sent_again(
    keyed, monkeypatch, capsys
):
    message = keyed.contributions()[0]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "coterie.secure_sum.encrypted", None)
        for _ in range(2):
            with pytest.raises(Refusal) as refused:
                await keyed.send(0, 0, message)
            assert refused.value.reason == ErrorReason.ERROR_REASON_NOT_READY
    assert capsys.readouterr().out.count("pip install 'coterie[paillier]'") == 1
    assert await keyed.send(0, 0, message)


async def test_a_table_of_an_earlier_release_gets_the_columns_of_key_and_plan(keyed):
    with keyed.engine.begin() as connection:
        # It opened no such sum to intakes.
        connection.exec_driver_sql("DELETE FROM intake_sums")
        connection.exec_driver_sql("ALTER TABLE intake_sums DROP COLUMN terms, DROP COLUMN plan_hash")
        contributions.make_tables(connection)
        contributions.make_tables(connection)
    keyed.restart()
    async with asyncio.timeout(SOON_S):
        while (opened := await keyed.intakes[0].opened_to(("run", 1), PARTIES[0], [])) is None:
            await asyncio.sleep(0.01)
    assert opened.half.keys.of(keyed.plan) == held_by_all().public
