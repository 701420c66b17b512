"""A fault at a chosen step fails only the requests it should, each gets one error, and the next request is served."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.reliability.calls import Endpoint, Result, ask, calling
from tests.reliability.conftest import QUIET
from tests.reliability.counts import Counts, counts, idle, until
from tests.reliability.reciter import LOOP, recital
from tests.server.harness import Model, Server, serve

_TOKENS = 150
_LEAD = 90  # steps before a fault, in which all requests of the batch arrive
_BATCH = (Endpoint.REST_STREAM, Endpoint.GRPC_STREAM, Endpoint.REST_STREAM, Endpoint.GRPC_STREAM)
_RECOVERED_S = 10.0  # ten times the figure that the bench holds


@dataclass(frozen=True)
class Fault:
    """``hurts`` counts the requests that fail, ``tries`` the further forwards that only find the culprit."""

    name: str
    spelling: str
    step: int
    hurts: int
    says: str
    failed: int
    tries: int


_ALL_TRIES = 2 * len(_BATCH) - 2  # two halves, and the four sequences


def _of_all(kind: str, step: int) -> str:
    return ",".join(f"decode:{call}:{kind}" for call in range(step, step + 1 + _ALL_TRIES))


# A step that fails is tried again in halves. The culprit's half fails too, and then the culprit alone; its neighbour
# and the other half are well. Where all tries fail, so do all sequences; where no sequence's own try does, nobody is
# hurt (tests/engine/test_engine_faults.py).
_FAULTS = (
    Fault("culprit", "decode:100:raise,decode:101:raise,decode:102:raise", 100, 1, "RuntimeError", 1, 4),
    Fault("exception", _of_all("raise", 400), 400, 4, "RuntimeError", 1, _ALL_TRIES),
    Fault("memory", _of_all("oom", 600), 600, 4, "out of memory", 1, _ALL_TRIES),
    Fault("nan", "decode:800:nan", 800, 1, "", 0, 0),
    Fault("death", "decode:1100:death", 1100, 4, "the engine died", 1, 0),
)
# A batch of a prompt and a running sequence that raises is tried again, each of the two alone: the prompt fails when
# that raises too.
_PREFILL_FAULTS = "prefill:61:raise,prefill:62:raise,prefill:64:oom,prefill:65:oom,prefill:67:nan,prefill:69:death"


@dataclass(frozen=True)
class Outcome:
    before: Counts
    after: Counts
    results: list[Result]
    recovered_s: float
    following: Result


@pytest.fixture(scope="module")
def faulty(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spelled = ",".join([*(fault.spelling for fault in _FAULTS), _PREFILL_FAULTS, "decode:1:slow=0.01"])
    models = [Model("decoding", str(recite)), Model("prefilling", str(recite))]
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": spelled}
    folder = tmp_path_factory.mktemp("faulty") / "models"
    with serve(folder, models, settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def outcomes(faulty: Server) -> dict[str, Outcome]:
    """One engine has all faults in turn; each hits a batch of four requests in the middle of their answers."""
    found = {}
    uncounted = 0  # forwards that are no decode steps
    for fault in _FAULTS:
        steps = int(idle(faulty, "decoding")["decode_steps"]) + uncounted
        ahead = fault.step - _LEAD - steps
        assert ahead > 1, f"{fault.name}: its step has been passed"
        ask(Endpoint.REST_UNARY, faulty, "decoding", max_tokens=ahead)
        found[fault.name] = _meet(faulty)
        uncounted += fault.failed + fault.tries
    return found


def _meet(server: Server) -> Outcome:
    before = idle(server, "decoding")
    with ExitStack() as stack:
        calls = [stack.enter_context(calling(endpoint, server, "decoding", max_tokens=_TOKENS)) for endpoint in _BATCH]
        until(server, "decoding", lambda now: now.requests("error") > before.requests("error"), 60)
        hit = time.monotonic()
        following = ask(Endpoint.REST_UNARY, server, "decoding", max_tokens=5)
        recovered = time.monotonic() - hit
        results = [call.end() for call in calls]
    return Outcome(before, idle(server, "decoding"), results, recovered, following)


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
class TestAFaultInADecodeStep:
    def test_fails_the_right_requests_and_no_others(self, outcomes: dict[str, Outcome], fault: Fault) -> None:
        results = outcomes[fault.name].results
        failed = [result for result in results if result.reasons == ["error"]]
        assert len(failed) == fault.hurts
        for result in results:
            assert result.code is None and result.text, "all of them had begun"
            if result not in failed:
                assert (result.reasons, result.text) == (["length"], recital(_TOKENS))
            assert recital(_TOKENS).startswith(result.text.rstrip("�"))

    def test_is_told_once_to_each(self, outcomes: dict[str, Outcome], fault: Fault) -> None:
        for result in outcomes[fault.name].results:
            finals = [reply for reply in result.replies if reply.final]
            assert len(finals) == 1 and finals[0] is result.replies[-1]
            told = [event for event in result.events if "error" in event]
            if result.reasons == ["error"] and result.endpoint.rest:
                assert told == [result.events[-1]] and fault.says in told[0]["error"]
                assert told[0]["outputs"] and told[0]["model_name"] == "decoding", "an event of V2 too"
            else:
                assert not told

    def test_is_counted(self, outcomes: dict[str, Outcome], fault: Fault) -> None:
        before, after = outcomes[fault.name].before, outcomes[fault.name].after
        assert after.requests("error") - before.requests("error") == fault.hurts
        assert after.errors(500) - before.errors(500) == fault.hurts

    def test_leaves_a_server_that_serves(self, outcomes: dict[str, Outcome], fault: Fault) -> None:
        outcome = outcomes[fault.name]
        assert outcome.following.text == recital(5)
        assert outcome.recovered_s < _RECOVERED_S


def test_a_fault_in_a_prefill_fails_that_request_with_a_status(faulty: Server) -> None:
    """Exception, out of memory, NaN and death, each through another endpoint, beside a stream on the same engine."""
    for _ in range(59):
        assert ask(Endpoint.REST_UNARY, faulty, "prefilling", max_tokens=1).text == recital(1)
    with calling(Endpoint.REST_STREAM, faulty, "prefilling", max_tokens=1500) as beside:
        beside.read(1)
        for endpoint in (Endpoint.REST_STREAM, Endpoint.GRPC_UNARY, Endpoint.REST_UNARY):
            _fails(ask(endpoint, faulty, "prefilling", max_tokens=2))
            assert ask(endpoint, faulty, "prefilling", max_tokens=2).text == recital(2)
        assert counts(faulty, "prefilling")["running_sequences"] == 1, "the stream beside them goes on"
        _fails(ask(Endpoint.GRPC_STREAM, faulty, "prefilling", max_tokens=2))
        ended = beside.end()
    assert ended.reasons == ["error"], "the engine's death ends it"
    assert ended.text and recital(LOOP).startswith(ended.text[:8].rstrip("�"))
    assert "the engine died" in ended.events[-1]["error"]
    assert ask(Endpoint.GRPC_STREAM, faulty, "prefilling", max_tokens=LOOP).text == recital(LOOP)


def _fails(result: Result) -> None:
    assert result.code == (500 if result.endpoint.rest else grpc.StatusCode.INTERNAL) and result.said
