"""The audit by multiplicity on real runs: clean ones, and with leaks put in one at a time.

Every system and every sum is trained once, over real processes.  A leak is put into a copy of what the parties held
(`leaks`).  The audit must find it, or the threat model lists it among what the audit cannot see.
"""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from coterie.crypto.sealed import Header
from coterie.privacy.transcript import TranscriptEntry, TranscriptWriter, decode, read_transcript
from coterie.privacy.visibility import Audit, HistorySearch, observed
from coterie.process.private_files import open_to_others, private_in
from coterie.systems.visibility import matrix
from coterie.wire.v1.orchestrator_pb2 import RecommendRequest, SubmitKind

from .leaking_host import Leaking
from .leaks import COS, LEAKS, OPERATOR, Changed
from .watched_runs import FEW, HISTORIES, MANY, SETTINGS, unstarted, watch

ROOT = Path(__file__).parents[2]
NOT_RECORDED = {"headers and trailers of calls"}
"""Rows of the threat model's table for what no record of a run holds, and no leak can be put into."""


def of_runs(*combinations):
    """Return parameters, each in the group of its run: it is trained in one worker."""
    return [
        pytest.param(each, marks=pytest.mark.xdist_group(f"audit {each[0]} {each[2]}"), id=" ".join(each))
        for each in combinations
    ]


EACH = pytest.mark.parametrize("combination", of_runs(*SETTINGS))


@pytest.fixture(scope="module")
def runs(small, federation):
    """Return a function that trains a run when it is asked for, and keeps it."""
    made = {}

    def make(combination):
        if combination not in made:
            made[combination] = watch(combination, small, federation)
        return made[combination]

    return make


def auditing(run):
    return Audit(run.kit, run.rows, run.histories)


@EACH
def test_a_clean_run_gives_no_finding(runs, combination):
    run = runs(combination)
    audit = auditing(run)
    for party, child in run.running.children.items():
        audit.audit_transcript(party, run.transcripts[party])
        audit.audit_tree(party, child.folder)
        for page in (child.log.read_bytes(), *run.pages[party].values()):
            audit.audit_page(party, "page", page)
    audit.audit_tree(OPERATOR, run.running.folder / "operator")
    result = audit.result()
    assert result.violations == ()
    # The histories are where they may be.
    assert {party for party, kinds in result.seen.items() if kinds["history"] == "seen"} == set(
        run.running.parties("client")
    )
    declared = matrix(*combination)
    for party, kinds in observed({party: [path] for party, path in run.transcripts.items()}).items():
        for kind, seen in kinds.items():
            assert not seen or declared[party.partition("/")[0]][kind].allowed, (party, kind)


def found(run, combination, changed: Changed, folder: Path):
    """Return what the audit objects to in what a leak changed."""
    audit, forbidden = auditing(run), set()
    for party, entries in changed.messages.items():
        path = folder / "transcript.bin"
        path.unlink(missing_ok=True)
        write(path, party, entries)
        audit.audit_transcript(party, path)
        declared = matrix(*combination)[party.partition("/")[0]]
        seen = observed({party: [path]})[party]
        forbidden |= {kind for kind, yes in seen.items() if yes and not declared[kind].allowed}
    for party, page in changed.pages.items():
        audit.audit_page(party, "page", page)
    for party, name, content in changed.files:
        path = folder / party.replace("/", "-") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        audit.audit_tree(party, folder / party.replace("/", "-"))
        path.unlink()
    return forbidden | {one.kind for one in audit.result().violations}


def write(path: Path, party: str, entries: list[TranscriptEntry]) -> None:
    with TranscriptWriter(path, party) as writer:
        for entry in entries:
            writer.record(
                rpc=entry.rpc,
                peer=entry.peer,
                direction=entry.direction,
                payload=entry.payload,
                side=entry.side,
            )


@EACH
def test_every_leak_is_found_or_said_to_be_unseen(runs, combination, tmp_path):
    run = runs(combination)
    missed, seen_all_the_same = [], []
    for leak in LEAKS:
        changed = leak.put(run)
        assert (changed is not None) == (not leak.only or bool({*leak.only} & {*combination})), leak.name
        if changed is None:
            continue
        # The leak is the reason, and not that only a part of what was recorded is searched.
        assert not found(run, combination, Changed(changed.before), tmp_path), leak.name
        kinds = found(run, combination, changed, tmp_path)
        if leak.unseen and kinds:
            seen_all_the_same.append((leak.name, kinds))
        if not leak.unseen and not kinds:
            missed.append(leak.name)
    assert missed == []
    assert seen_all_the_same == []


@EACH
def test_no_file_in_a_state_folder_is_open_to_others(runs, combination):
    for party, child in runs(combination).running.children.items():
        files = [path for path in child.state.rglob("*") if path.is_file()]
        # Both are public, and written by commands before the service starts.
        assert {path.name for path, _ in open_to_others(files)} <= {"ca.pem", "roster.pub"}, party
        assert len(list(private_in(child.state))) >= 2


# --- lengths of messages ------------------------------------------------------------------------------------------


def sent_by(run, party, rpc):
    """Return the messages that a party sent of an RPC."""
    for entry in read_transcript(run.transcripts[party]):
        if (entry.rpc, entry.direction) == (rpc, "sent"):
            yield decode(entry)


def lengths(run, party):
    """Return the lengths of what a host submits, by kind, without what differs between any two hosts or calls."""
    found, kind = defaultdict(set), 0
    for message in sent_by(run, party, "Submit"):
        # The number of a slot, and the cursor of a poll, take a byte more or less.
        message.ClearField("slots")
        message.ClearField("poll")
        kind = message.kind or kind
        if kind != SubmitKind.SUBMIT_KIND_DECRYPTION:
            # Those who hold the key decrypt parts of a sum, which are no user's.
            found[SubmitKind.Name(kind)].add(message.ByteSize())
    return found


@EACH
def test_what_a_host_submits_is_as_long_for_few_items_as_for_many(runs, combination):
    run = runs(combination)
    few, many = lengths(run, FEW), lengths(run, MANY)
    assert few.keys() == many.keys() != set()
    assert few["SUBMIT_KIND_VECTOR"] == many["SUBMIT_KIND_VECTOR"]
    for kind in few:
        # Position 0 in a sum takes no bytes in protobuf: messages that say it are two bytes longer for the others.
        for one, other in zip(sorted(few[kind]), sorted(many[kind]), strict=True):
            assert abs(one - other) <= 2, kind


@pytest.mark.parametrize("combination", of_runs(*(each for each in SETTINGS if each[0] == "drift")))
def test_in_drift_five_bytes_a_record_tell_an_owner_and_the_network_how_many_there_are(runs, combination):
    run = runs(combination)
    records, rest = {}, set()
    for host in (FEW, MANY):
        records[host] = 0
        for request in sent_by(run, host, "SubmitInteractions"):
            for batch in request.batches:
                count = Header.parse(batch.header).count
                rest.add(len(batch.ciphertext) - 5 * count)
                records[host] += count
    # The last two of a user's items are held out; an item of several owners goes to each of them.
    assert records[FEW] >= HISTORIES[0] - 2
    assert records[MANY] >= HISTORIES[1] - 2
    # Nothing else in them depends on the user: a tag of 16 bytes, and in the shielded form the user's row and visit.
    assert len(rest) <= 2
    assert 16 in rest or combination[1] == "shielded"


def asked(run, host):
    """Return how many recommendations a host asked the COS for."""
    return {each.k for each in sent_by(run, host, "Recommend") if isinstance(each, RecommendRequest)}


@pytest.mark.parametrize("combination", of_runs(("drift", "published", "clear")))
def test_in_the_published_form_a_request_for_recommendations_tells_how_many_items_were_seen(
    runs, combination
):
    run = runs(combination)
    (few,), (many,) = asked(run, FEW), asked(run, MANY)
    assert many - few == HISTORIES[1] - HISTORIES[0]


def test_the_threat_model_lists_what_the_audit_cannot_see():
    text = (ROOT / "docs" / "threat-model.md").read_text()
    _, _, table = text.partition("| not seen | why | limit |\n")
    listed = {line.split(" | ")[0].removeprefix("| ") for line in table.partition("\n\n")[0].splitlines()[1:]}
    assert listed - NOT_RECORDED == {leak.name for leak in LEAKS if leak.unseen}
    assert listed >= NOT_RECORDED
    assert len({leak.name for leak in LEAKS}) == len(LEAKS)
    caught = sum(not leak.unseen for leak in LEAKS)
    assert f"{len(LEAKS)} leaks" in text
    assert f"finds {caught} of them" in text


# --- leaks of real services ---------------------------------------------------------------------------------------


LEAKING = {"client/host-0": "log", FEW: "name", "client/host-2": "metric"}
"""Hosts with their leaks."""


def test_leaks_of_real_hosts_are_found(small, tmp_path):
    def federation(settings, *, feed, **options):
        return Leaking(settings, feed, tmp_path, LEAKING, **options)

    # One host writes item keys into its log, one into a label of a metric, and one into the name of its user, which
    # the server refuses; so the run does not begin.
    running, kit, rows = unstarted(("fedmf", "hosts", "clear"), small, federation)

    async def until_refused():
        async with running:
            await running.start()
            await running.up("client/host-0", "client/host-2")
            await running.change("client/host-0", "joined")
            await running.comes_true(
                lambda: "participants.name" in running.cos.log.read_text(), "the name is refused"
            )
            # The host whose registration is refused has ended.
            pages = {party: running.page(party).encode() for party in LEAKING if party != FEW}
            await running.stop()
            return pages

    pages = asyncio.run(until_refused())
    data, catalogue = running.feed.dataset, running.stores.item_keys()
    index = {key: number for number, key in enumerate(catalogue)}
    histories = HistorySearch(catalogue)
    for user, host in enumerate(running.feed.host):
        own = [index[data.items[item]] for item in data.item[data.user == user]]
        if f"client/host-{host}" in LEAKING and len(own) >= 12:
            histories.plant(own, {f"client/host-{host}"})
    audit = Audit(kit, rows, histories)
    audit.audit_transcript(COS, running.cos.state / "transcript.bin")
    for party, page in pages.items():
        audit.audit_page(party, f"{party} metrics", page)
    for party, child in running.children.items():
        audit.audit_page(party, f"{party} log", child.log.read_bytes())
    found = {(one.party, one.source) for one in audit.result().violations if one.kind == "history"}
    assert found >= {
        (OPERATOR, "client/host-0 log"),
        (OPERATOR, "client/host-2 metrics"),
        (COS, "Register received: Participant.name"),
    }
    # Nothing but these, and the messages of which the name is a part.
    assert {source for _, source in found} <= {
        "client/host-0 log",
        "client/host-2 metrics",
        "Register received: Participant.name",
        f"Register received, {FEW}: Participant.name",
    }
    kinds = observed({COS: [running.cos.state / "transcript.bin"]})[COS]
    assert kinds["misplaced"]
