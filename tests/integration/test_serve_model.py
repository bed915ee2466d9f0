"""``coterie serve-model``: what it answers over gRPC and HTTP is what the run's own hosts and the library compute."""

import datetime
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coterie as ct
from coterie.errors import CertificateError, ConfigError
from coterie.serving.answers import ModelAnswers, ServedUser, ServingLimits
from coterie.serving.running import ServingAddresses
from coterie.wire.serving import serving_pb2 as wire
from coterie.wire.serving.serving_pb2_grpc import ModelServerStub

from ..interactions import ratings

WAIT_S = 60
ROUNDS = {"passes": 2, "evaluate_every": 1, "cohort": 30, "group": 30, "min_cohort": 10, "min_sum": 10}
NAMES = {"user": "customer", "item": "sku", "rating": "stars", "time": "at", "name": "shop"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ct.FederatedRun, Path]]:
    """Return a function that trains a system in process, and gives its run and the folder of its model."""
    made: dict[str, tuple[ct.FederatedRun, Path]] = {}
    split = {kind: ct.load(ratings(), **NAMES).split(kind) for kind in ("random", "leave-last-out")}

    def train(system: str) -> tuple[ct.FederatedRun, Path]:
        if system not in made:
            folder = tmp_path_factory.mktemp(system)
            recommender: Any = {
                "fedmf": lambda: ct.FedMF(rounds=ROUNDS, reference=False),
                "fedncf": lambda: ct.FedNCF(model="gmf", rounds=ROUNDS, reference=False),
                "ease": lambda: ct.FedEASE(reference=False),
            }[system]()
            kind = "random" if system == "fedmf" else "leave-last-out"
            run = recommender.fit(split[kind], in_process=True, output=folder / "runs")
            made[system] = run, run.save(folder / "model")
        return made[system]

    return train


class Served:
    """``coterie serve-model`` as a process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "coterie", "serve-model", str(folder)),
                *("--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--json", *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        self.at = json.loads(line)["result"]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=WAIT_S)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.fixture(scope="module")
def served(trained: Callable[[str], tuple[ct.FederatedRun, Path]]) -> Iterator[Served]:
    process = Served(trained("fedmf")[1])
    yield process
    assert process.end() == 0


@pytest.fixture(scope="module")
def web(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.at['http']}", timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.at["grpc"]) as channel:
        yield ModelServerStub(channel)


def factors(run: ct.FederatedRun, user: int, name: str = "factors") -> list[float]:
    """Return the vector that the only host of a run in process keeps for a user, by position."""
    sides: Any = run._ended.made
    sides.restore()
    for side in sides.hosts:
        private = side.private if isinstance(side.private, dict) else dict(side.private.arrays())
        if user < len(private[name]):
            return [float(one) for one in private[name][user]]
        user -= len(private[name])
    raise AssertionError("no such user")


def best(run: ct.FederatedRun, scores: Any, seen: set[str], k: int) -> list[str]:
    order = np.argsort(-np.asarray(scores), kind="stable")
    return [run.model.items[one] for one in order if run.model.items[one] not in seen][:k]


# --- what is answered ----------------------------------------------------------------------------------------------


def test_a_history_is_answered_alike_over_both_protocols_and_as_by_the_library(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]], web: httpx.Client, stub: Any
) -> None:
    run, folder = trained("fedmf")
    items = run.model.items
    own = {items[0]: 5.0, items[3]: 2.0, items[7]: 4.0}
    expected = ct.load_model(folder).recommend(own, k=5).to_dicts()
    answer = web.post("/recommend", json={"history": {**own, "unheard of": 3}, "k": 5}).json()
    assert answer == {
        "items": [{"item": one["item"], "score": pytest.approx(one["score"])} for one in expected],
        "unknown": ["unheard of"],
    }
    history = [wire.RatedItem(item=item, rating=rating) for item, rating in own.items()]
    (found,) = stub.Recommend(
        wire.ModelRecommendRequest(users=[wire.ModelUser(history=history)], k=5)
    ).answers
    assert list(found.items) == [one["item"] for one in expected]
    assert list(found.scores) == pytest.approx([one["score"] for one in expected])
    assert (
        len(
            stub.Recommend(wire.ModelRecommendRequest(users=[wire.ModelUser(history=history)]))
            .answers[0]
            .items
        )
        == 10
    )


@pytest.mark.parametrize(("system", "name"), [("fedmf", "factors"), ("fedncf", "embedding")])
def test_a_vector_gives_the_scores_that_the_users_own_host_computes(
    system: str, name: str, trained: Callable[[str], tuple[ct.FederatedRun, Path]]
) -> None:
    run, folder = trained(system)
    model = ct.load_model(folder)
    answers = ModelAnswers(model)
    side: Any = run._ended.made.hosts[0]
    vector = factors(run, 0, name)
    assert answers.vector_length == len(vector)
    scores = side.recommend(run.host_scores.model, 0)
    (found,) = answers.recommend([ServedUser(vector=vector, exclude=[model.items[4]])], 6)
    assert list(found.items) == best(run, scores, {model.items[4]}, 6)


def test_a_central_model_is_served_as_the_library_scores(tmp_path: Path) -> None:
    fitted = ct.EASE().fit(ct.load(ratings(), **NAMES).split("leave-last-out"))
    folder = fitted.save(tmp_path / "model")
    own = ["i1", "i3", "i7"]
    expected = ct.load_model(folder).recommend(own, k=4).to_dicts()
    process = Served(folder)
    try:
        with httpx.Client(base_url=f"http://{process.at['http']}", timeout=WAIT_S) as client:
            answer = client.post("/recommend", json={"history": own, "k": 4}).json()
            told = client.get("/model").json()
            refused = client.post("/recommend", json={"vector": [1.0]})
        with grpc.insecure_channel(process.at["grpc"]) as channel:
            history = [wire.RatedItem(item=item) for item in own]
            request = wire.ModelRecommendRequest(users=[wire.ModelUser(history=history)], k=4)
            found = ModelServerStub(channel).Recommend(request).answers[0]
    finally:
        assert process.end() == 0
    assert [one["item"] for one in answer["items"]] == [one["item"] for one in expected] == list(found.items)
    assert list(found.scores) == pytest.approx([one["score"] for one in expected])
    assert (told["system"], told["vector_length"], told["takes_histories"]) == ("ease-central", 0, True)
    assert refused.status_code == 422


def test_a_batch_of_vectors_and_histories_is_answered_in_order_and_as_one_by_one(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]], web: httpx.Client, stub: Any
) -> None:
    run, _ = trained("fedmf")
    items = run.model.items
    users = [
        {"vector": factors(run, 1)},
        {"history": {items[0]: 5, items[1]: 1}},
        {"vector": factors(run, 2), "exclude": [items[0]]},
        {"history": {items[2]: 4, items[5]: None}},
    ]
    one_by_one = [web.post("/recommend", json={**user, "k": 4}).json() for user in users]
    together = web.post("/recommend/batch", json={"users": users, "k": 4}).json()["answers"]
    assert together == one_by_one
    # An item without a rating is not recommended again.
    assert items[5] not in [one["item"] for one in together[3]["items"]]
    request = wire.ModelRecommendRequest(
        users=[
            wire.ModelUser(vector=users[0]["vector"]),
            wire.ModelUser(vector=users[2]["vector"], exclude=[items[0]]),
        ],
        k=4,
    )
    found = [list(one.items) for one in stub.Recommend(request).answers]
    assert found == [[one["item"] for one in together[place]["items"]] for place in (0, 2)]


def test_both_say_what_the_model_takes_and_that_they_serve(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]], served: Served, web: httpx.Client, stub: Any
) -> None:
    run, _ = trained("fedmf")
    told = web.get("/model").json()
    said = stub.Describe(wire.DescribeModelRequest())
    assert (told["system"], told["items"], told["run"]) == ("fedmf", len(run.model.items), run.folder.name)
    assert (said.system, said.items, said.run) == ("fedmf", len(run.model.items), run.folder.name)
    assert told["vector_length"] == said.vector_length == len(factors(run, 0))
    assert told["ratings"] == [said.ratings.lowest, said.ratings.highest]
    assert told["limits"]["users"] == said.most_users == ServingLimits().users
    assert web.get("/health").json() == {"status": "serving"}
    with grpc.insecure_channel(served.at["grpc"]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# --- what is refused -----------------------------------------------------------------------------------------------


BAD: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({}, "neither vector nor history"),
    ({"vector": [0.0], "history": ["i1"]}, "both vector and history"),
    ({"vector": [0.0, 1.0]}, "a vector of 2 values; expected "),
    ({"vector": ["a"]}, "expected a list of numbers"),
    ({"vector": [True]}, "expected a list of numbers"),
    ({"history": "i1"}, "expected a list of items"),
    ({"history": {"i1": "five"}}, "expected a number or null"),
    ({"history": {"i1": 99}}, "rating 99 of item 'i1'; expected 0.5 to 5"),
    ({"history": []}, "no item of the history"),
    ({"history": {"unheard of": 3}}, "no item of the history is one of the model's"),
    ({"history": {"i1": 4}, "k": 0}, "k is 0; expected 1 to 1000"),
    ({"history": {"i1": 4}, "k": 1001}, "k is 1001; expected 1 to 1000"),
    ({"history": {"i1": 4}, "k": 2.5}, "expected a whole number"),
    ({"history": {"i1": 4}, "exclude": "i2"}, "exclude is"),
    ({"history": {"i1": 4}, "kk": 2}, "unknown key 'kk'"),
    (
        {"history": {f"x{number}": 3 for number in range(10_001)}},
        "a history of 10001 items; expected at most 10000",
    ),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_a_wrong_request_is_refused_with_what_was_expected(body: Any, said: str, web: httpx.Client) -> None:
    answer = web.post("/recommend", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_what_is_no_request_is_refused_before_it_is_read(web: httpx.Client) -> None:
    kind = {"content-type": "application/json"}
    half = '{"history": ["\\ud800"]}'.encode("utf-16")
    surrogate = b'{"history": ["\xed\xa0\x80"]}'
    for content in (b"{", b'{"vector": [NaN]}', b"[" * 100_000, b"\xff\xfe", half, surrogate):
        assert web.post("/recommend", content=content, headers=kind).status_code == 400
    assert web.post("/recommend", data={"vector": "1"}).status_code == 415
    assert web.get("/recommend").status_code == 405
    assert web.get("/nowhere").status_code == 404
    large = web.post("/recommend", content=b" " * (ServingLimits().request_bytes + 1), headers=kind)
    assert large.status_code == 413
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""):
        assert web.get("/health", headers={"host": host}).status_code == 421
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1", "[::1]", "[::1]:8080"):
        assert web.get("/health", headers={"host": host}).status_code == 200
    batch = web.post("/recommend/batch", json={"users": [{"vector": [1.0]}] * 257})
    assert "257 users in one request; expected 1 to 256" in batch.json()["error"]["message"]
    second = web.post("/recommend/batch", json={"users": [{"history": {"i1": 4}}, {"history": {"i1": 9}}]})
    assert second.json()["error"]["message"].startswith("user 1: rating 9")
    assert web.get("/health").status_code == 200


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"vector": [' + HUGE + "]}", "expected a list of numbers"),
        ('{"vector": [1e400]}', "expected a list of numbers"),
        ('{"history": {"i1": ' + HUGE + "}}", "expected a number or null"),
        ('{"history": {"i1": 1e39}}', "rating 1e+39 of item 'i1'; expected 0.5 to 5"),
        ('{"history": {"i1": 4}, "k": ' + HUGE + "}", "expected a whole number"),
        ('{"history": ["\\ud800"]}', "half of a surrogate pair"),
        ('{"history": {"i1": 4}, "exclude": ["\\udfff"]}', "half of a surrogate pair"),
        ('{"\\ud800": 1}', "half of a surrogate pair"),
        ('{"history": ' + "[" * 900 + "1" + "]" * 900 + "}", "expected a list of items"),
    ],
)
def test_values_that_json_bears_and_the_model_does_not_are_refused(
    content: str, said: str, web: httpx.Client
) -> None:
    answer = web.post("/recommend", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_vector_whose_scores_overflow_is_refused(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]], web: httpx.Client, stub: Any
) -> None:
    length = len(factors(trained("fedmf")[0], 0))
    message = "are so large that scores are no finite numbers"
    answer = web.post("/recommend", json={"vector": [3e38] * length})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    # The limit of 32 bits itself.
    answer = web.post("/recommend", json={"vector": [1e39] * length})
    assert "no finite number of 32 bits" in answer.json()["error"]["message"]
    with pytest.raises(grpc.RpcError) as refused:
        stub.Recommend(wire.ModelRecommendRequest(users=[wire.ModelUser(vector=[3e38] * length)]))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in refused.value.details()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["i1", "i2", "vector", "history", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
USERS = st.fixed_dictionaries({}, optional=dict.fromkeys(("vector", "history", "exclude", "k", "x"), VALUES))


@given(st.one_of(USERS, VALUES, st.fixed_dictionaries({"users": st.lists(USERS, max_size=3)})))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_is_answered_or_refused(web: httpx.Client, body: Any) -> None:
    for path in ("/recommend", "/recommend/batch"):
        answer = web.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 422)
        assert ("error" in answer.json()) is (answer.status_code != 200)


def test_wrong_requests_over_grpc_name_what_is_wrong(stub: Any) -> None:
    def refused(request: wire.ModelRecommendRequest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as error:
            stub.Recommend(request)
        return error.value.code(), error.value.details()

    code, said = refused(wire.ModelRecommendRequest())
    assert (code, "0 users in one request" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    _, said = refused(wire.ModelRecommendRequest(users=[wire.ModelUser(vector=[1.0])]))
    assert "user 0: a vector of 1 values" in said
    code, _ = refused(wire.ModelRecommendRequest(users=[wire.ModelUser(exclude=["x" * (5 << 20)])]))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_system_says_what_it_does_not_take(trained: Callable[[str], tuple[ct.FederatedRun, Path]]) -> None:
    ease = ModelAnswers(ct.load_model(trained("ease")[1]))
    assert ease.vector_length == 0
    with pytest.raises(ConfigError, match="user 0: users of ease keep no vector") as refused:
        ease.recommend([ServedUser(vector=[1.0])])
    assert refused.value.hint == "send a history"
    (found,) = ease.recommend([ServedUser(history=[(ease.model.items[0], None)])], 3)
    assert len(found.items) == 3
    neural = ModelAnswers(ct.load_model(trained("fedncf")[1]))
    with pytest.raises(ConfigError, match="has no recommendations for users who never took part"):
        neural.recommend([ServedUser(history=[(neural.model.items[0], None)])])


def test_what_a_system_has_not_is_no_wrong_request(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]],
) -> None:
    process = Served(trained("ease")[1])
    try:
        answer = httpx.post(f"http://{process.at['http']}/recommend", json={"vector": [1.0]}, timeout=WAIT_S)
        assert answer.status_code == 422
        assert "users of ease keep no vector" in answer.json()["error"]["message"]
        with grpc.insecure_channel(process.at["grpc"]) as channel:
            stub: Any = ModelServerStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Recommend(wire.ModelRecommendRequest(users=[wire.ModelUser(vector=[1.0])]))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    finally:
        assert process.end() == 0


# --- addresses, TLS, the folder ------------------------------------------------------------------------------------


def test_addresses_beyond_this_machine_need_a_certificate(tmp_path: Path) -> None:
    for address in ("0.0.0.0:80", "192.168.1.4:80", "example.org:80", "[::]:80"):
        with pytest.raises(ConfigError, match="open to other machines"):
            ServingAddresses(address, None)
    for address in ("127.0.0.1", ":80", "127.0.0.1:http", "127.0.0.1:70000"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            ServingAddresses(None, address)
    with pytest.raises(ConfigError, match="go together"):
        ServingAddresses("127.0.0.1:1", None, certificate=tmp_path / "a")
    with pytest.raises(ConfigError, match="nothing would be served"):
        ServingAddresses(None, None)
    ServingAddresses("localhost:1", "[::1]:2")


def test_another_address_of_this_machine_answers_by_its_name(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]],
) -> None:
    process = Served(trained("fedmf")[1], "--http=127.0.0.2:0", "--grpc=none")
    try:
        assert httpx.get(f"http://{process.at['http']}/health", timeout=WAIT_S).status_code == 200
        elsewhere = {"host": "evil.example"}
        refused = httpx.get(f"http://{process.at['http']}/health", headers=elsewhere, timeout=WAIT_S)
        assert refused.status_code == 421
    finally:
        assert process.end() == 0


def pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    kept = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, kept)


def certificate_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    good, chain = pem(key), certificate_of(key)
    other = pem(ec.generate_private_key(ec.SECP256R1()))
    at = ServingAddresses("127.0.0.1:1", None, tmp_path / "chain.pem", tmp_path / "key.pem")
    for of_chain, of_key, said in (
        (b"junk", good, "chain.pem holds no certificate"),
        (good, good, "chain.pem holds no certificate"),
        (chain, b"junk", "key.pem holds no private key"),
        (chain, chain, "key.pem holds no private key"),
        (chain, pem(key, b"word"), "key.pem has a passphrase"),
        (chain, other, "key.pem is not that of the certificate"),
    ):
        (tmp_path / "chain.pem").write_bytes(of_chain)
        (tmp_path / "key.pem").write_bytes(of_key)
        with pytest.raises(CertificateError, match=said):
            at.credentials()
    (tmp_path / "key.pem").write_bytes(good)
    assert at.credentials() is not None
    (tmp_path / "key.pem").unlink()
    with pytest.raises(CertificateError, match=r"cannot read .*key\.pem"):
        at.credentials()


def test_both_protocols_are_served_under_a_certificate(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]], tmp_path: Path
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    chain = certificate_of(key)
    (tmp_path / "chain.pem").write_bytes(chain)
    (tmp_path / "key.pem").write_bytes(pem(key))
    files = (f"--certificate={tmp_path / 'chain.pem'}", f"--key={tmp_path / 'key.pem'}")
    process = Served(trained("fedmf")[1], *files)
    try:
        web, rpc = (f"localhost:{process.at[one].rpartition(':')[2]}" for one in ("http", "grpc"))
        trusted = ssl.create_default_context(cafile=tmp_path / "chain.pem")
        assert httpx.get(f"https://{web}/health", verify=trusted).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{web}/health")
        with grpc.secure_channel(rpc, grpc.ssl_channel_credentials(chain)) as channel:
            stub: Any = ModelServerStub(channel)
            assert stub.Describe(wire.DescribeModelRequest(), timeout=WAIT_S).system == "fedmf"
        with grpc.insecure_channel(rpc) as channel:
            stub = ModelServerStub(channel)
            with pytest.raises(grpc.RpcError):
                stub.Describe(wire.DescribeModelRequest(), timeout=5)
    finally:
        assert process.end() == 0


def test_a_model_that_was_changed_is_not_served(
    trained: Callable[[str], tuple[ct.FederatedRun, Path]], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained("fedmf")[1], folder)
    arrays = bytearray((folder / "model.safetensors").read_bytes())
    arrays[-5] ^= 1
    (folder / "model.safetensors").write_bytes(arrays)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coterie", "serve-model", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 20
    assert "model.safetensors is not the file that was saved" in json.loads(done.stdout)["error"]["message"]
