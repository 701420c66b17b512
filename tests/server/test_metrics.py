"""The metrics of a real server: what they count, where they are shown, and what can never become a label."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from itertools import pairwise

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from mlserver_torch_stream import client
from mlserver_torch_stream.server.observability.request_observer import ERRORS, REQUEST_REASONS
from tests import plain_http
from tests.server import v2
from tests.server.harness import HOST, Server
from tests.server.scrape import Scrape, on_metrics_port, on_rest_port, settled
from tests.server.test_statuses import queue_filled

_TINY = {"model": "tiny", "version": "v1"}
_INFER = "/v2/models/tiny/infer"
_STREAM = "/v2/models/tiny/infer_stream"


@pytest.fixture(scope="module")
def observed_stub(observed: Server) -> Iterator[Stub]:
    with grpc.insecure_channel(observed.grpc_target) as channel:
        yield Stub(channel)


def _requests(scrape: Scrape, model: str = "tiny") -> dict[str, float]:
    return scrape.by("finish_reason", "torch_stream_requests_total", model=model)


def _errors(scrape: Scrape, model: str = "tiny") -> dict[str, float]:
    return scrape.by("status_code", "torch_stream_request_errors_total", model=model)


def _growth(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    grown = {key: value - before.get(key, 0) for key, value in now.items()}
    return {key: value for key, value in grown.items() if value}


def _of(server: Server, before: Scrape, requests: int) -> Scrape:
    """Waits until so many more requests to ``tiny`` have ended, and returns the scrape."""
    ended = sum(_requests(before).values()) + requests
    return settled(server, lambda now: sum(_requests(now).values()) >= ended)


def _histogram(scrape: Scrape, name: str) -> float:
    return scrape.value(f"torch_stream_{name}_seconds_count", **_TINY)


def _answered(server: Server, stub: Stub) -> None:
    """Sends eight requests with nine sequences that end at their maximum length, through every endpoint."""
    body = v2.rest_body("Hello fox", max_tokens=4, ignore_eos=True)
    request = v2.grpc_request("tiny", "Hello fox", max_tokens=4, ignore_eos=True)
    for _ in range(2):
        v2.rest_unary(server.url, _INFER, body)
        v2.rest_stream(server.url, _STREAM, body)
    v2.rest_unary(server.url, _INFER, v2.rest_body("Hello", max_tokens=4, ignore_eos=True, n=2, temperature=1))
    stub.ModelInfer(request, timeout=v2.TIMEOUT_S)
    list(stub.ModelStreamInfer(iter([request, request]), timeout=v2.TIMEOUT_S))


def test_requests_that_end_well_are_counted_and_timed_once(observed: Server, observed_stub: Stub) -> None:
    before = on_rest_port(observed)
    _answered(observed, observed_stub)
    after = _of(observed, before, 8)
    assert _growth(_requests(after), _requests(before)) == {"length": 8}
    assert _growth(_errors(after), _errors(before)) == {}
    for name, times in (("time_to_first_token", 8), ("request_queue_time", 8), ("e2e_request_latency", 8)):
        assert _histogram(after, name) - _histogram(before, name) == times
    sequences, tokens = "torch_stream_sequences_total", "torch_stream_generation_tokens_total"
    assert (
        after.value(sequences, finish_reason="length", **_TINY)
        - before.value(sequences, finish_reason="length", **_TINY)
        == 9
    )
    assert after.value(tokens, **_TINY) - before.value(tokens, **_TINY) == 9 * 4


def test_every_token_after_an_answers_first_event_is_one_gap(observed: Server) -> None:
    before = on_rest_port(observed)
    body = v2.rest_body("Hello fox", max_tokens=60, ignore_eos=True, return_token_ids=True)
    replies = v2.rest_stream(observed.url, _STREAM, body)
    counts = [len(reply.outputs["token_ids"]) for reply in replies if "token_ids" in reply.outputs]
    assert sum(counts) == 60
    after = _of(observed, before, 1)
    assert _histogram(after, "inter_token_latency") - _histogram(before, "inter_token_latency") == sum(counts[1:])


def test_refusals_are_counted_by_their_status(observed: Server, observed_stub: Stub) -> None:
    before = on_rest_port(observed)
    wrong = v2.rest_body("Hello", temperature="hot")
    for path in (_INFER, _STREAM):
        assert plain_http.post(f"{observed.url}{path}", json=wrong).status_code == 422
    assert plain_http.post(f"{observed.url}{_INFER}", content=b"{").status_code == 422
    assert plain_http.post(f"{observed.url}{_INFER}", json=v2.rest_body("x" * 70_000)).status_code == 413
    bad = v2.grpc_request("tiny", "Hello", temperature="hot")
    with pytest.raises(grpc.RpcError):
        observed_stub.ModelInfer(bad, timeout=v2.TIMEOUT_S)
    with pytest.raises(grpc.RpcError):
        list(observed_stub.ModelStreamInfer(iter([bad]), timeout=v2.TIMEOUT_S))
    good = v2.grpc_request("tiny", "Hello", max_tokens=1)
    list(observed_stub.ModelStreamInfer(iter([good, bad]), timeout=v2.TIMEOUT_S))
    malformed = v2.grpc_request("tiny", "Hello", raw=True)
    malformed.raw_input_contents[0] = b"Hello"
    with pytest.raises(grpc.RpcError):
        observed_stub.ModelInfer(malformed, timeout=v2.TIMEOUT_S)
    with pytest.raises(grpc.RpcError):
        list(observed_stub.ModelStreamInfer(iter([malformed]), timeout=v2.TIMEOUT_S))
    after = _of(observed, before, 10)
    assert _growth(_errors(after), _errors(before)) == {"422": 8, "413": 1}
    assert _growth(_requests(after), _requests(before))["refused"] == 9
    assert _histogram(after, "e2e_request_latency") - _histogram(before, "e2e_request_latency") == 1  # the good one's


def test_rejections_are_counted(slow: Server) -> None:
    before = on_rest_port(slow)
    with queue_filled(slow):
        for _ in range(3):
            body = v2.rest_body("Hello", max_tokens=2)
            assert plain_http.post(f"{slow.url}/v2/models/narrow/infer", json=body).status_code == 429
        assert on_rest_port(slow).value("torch_stream_waiting_requests", model="narrow") == 1
    after = settled(slow, lambda now: not now.value("torch_stream_running_sequences", model="narrow"))
    assert _growth(_errors(after, "narrow"), _errors(before, "narrow")) == {"429": 3}
    assert _growth(_requests(after, "narrow"), _requests(before, "narrow"))["refused"] == 3


def test_timeouts_are_counted_by_reason_and_if_the_client_saw_nothing_else_by_status(observed: Server) -> None:
    before = on_rest_port(observed)
    body = v2.rest_body("Hello", max_tokens=4, timeout=1)
    for path in (_INFER, _STREAM):
        assert plain_http.post(f"{observed.url}{path}", json=body, timeout=30).status_code == 504
    after = _of(observed, before, 2)
    assert _growth(_requests(after), _requests(before)) == {"timeout": 2}
    assert _growth(_errors(after), _errors(before)) == {"504": 2}
    name = "torch_stream_timed_out_sequences_total"
    assert after.value(name, **_TINY) - before.value(name, **_TINY) == 2


def test_clients_that_leave_are_counted_and_leave_nothing_behind(observed: Server, observed_stub: Stub) -> None:
    before = on_rest_port(observed)
    with closing(client.stream(observed.url, "tiny", "Hello", max_tokens=900, ignore_eos=True)) as deltas:
        next(deltas)
    call = observed_stub.ModelStreamInfer(
        iter([v2.grpc_request("tiny", "Hello", max_tokens=900, ignore_eos=True)]), timeout=v2.TIMEOUT_S
    )
    next(call)
    call.cancel()
    after = _of(observed, before, 2)
    assert _growth(_requests(after), _requests(before)) == {"cancelled": 2}
    assert _growth(_errors(after), _errors(before)) == {}
    assert _histogram(after, "e2e_request_latency") == _histogram(before, "e2e_request_latency")
    idle = settled(observed, lambda now: not now.value("torch_stream_running_sequences", **_TINY))
    for gauge in ("waiting_requests", "waiting_tokens", "prefilling_requests", "open_prompts"):
        assert idle.value(f"torch_stream_{gauge}", **_TINY) == 0
    reserved, budget = (idle.value(f"torch_stream_kv_cache_{each}", **_TINY) for each in ("bytes", "budget_bytes"))
    assert idle.value("torch_stream_kv_cache_usage_ratio", **_TINY) == reserved / budget < 1


def test_nothing_that_a_client_writes_becomes_a_label(observed: Server) -> None:
    body = {**v2.rest_body("evil-prompt", evil_key=1), "id": "evil-id"}
    plain_http.post(f"{observed.url}{_INFER}", json=body, headers={"x-client-id": "evil-client"})
    plain_http.post(f"{observed.url}/v2/models/evil-model/infer", json=v2.rest_body("x"))
    plain_http.post(f"{observed.url}/v2/models/tiny/versions/evil-version/infer", json=v2.rest_body("x"))
    allowed = {
        "model": {"tiny", "narrow"},
        "version": {"v1", ""},
        "finish_reason": set(REQUEST_REASONS),
        "status_code": set(ERRORS),
        "attention": {"kernels", "varlen", "torch", "transformers", "vllm"},
        "reason": {"new", "weights", "code", "chip", "damaged", "foreign"},
    }
    for label, value in on_rest_port(observed).label_values("torch_stream_"):
        assert label == "le" or value in allowed[label]
    for label, value in on_rest_port(observed).label_values("vllm:"):
        assert label == "le" or value in {"tiny", "narrow", "stop", "length", "abort", "error"}


def test_both_ports_show_ours_and_mlservers(observed: Server) -> None:
    rest, own = on_rest_port(observed), on_metrics_port(observed)
    for prefix in ("torch_stream_", "vllm:", "model_infer_request_", "rest_server_"):
        assert rest.names(prefix) == own.names(prefix) != set()
    assert rest.value("torch_stream_loaded_models") == 2


def test_the_attention_of_a_model_is_a_label_and_in_its_metadata(observed: Server) -> None:
    metadata = plain_http.get(f"{observed.url}/v2/models/tiny/versions/v1", timeout=10).json()
    labels = {"version": "v1", "attention": metadata["parameters"]["attention"]}
    assert on_rest_port(observed).value("torch_stream_model_info", model="tiny", **labels) == 1


def test_the_endpoint_picker_finds_vllms_names_where_they_are_asked_for(observed: Server, server: Server) -> None:
    shown = on_rest_port(observed)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert shown.value(f"vllm:{name}", model_name="tiny") >= 0
    same = {
        "vllm:prefix_cache_hits_total": "torch_stream_prefix_cache_hit_tokens_total",
        "vllm:generation_tokens_total": "torch_stream_generation_tokens_total",
        "vllm:num_preemptions_total": "torch_stream_num_preemptions_total",
        "vllm:time_to_first_token_seconds_count": "torch_stream_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "torch_stream_inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum": "torch_stream_inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count": "torch_stream_e2e_request_latency_seconds_count",
    }
    for theirs, ours in same.items():
        assert shown.value(theirs, model_name="tiny") == shown.value(ours, model="tiny")
    prompts = (
        shown.value(f"torch_stream_{kind}_tokens_total", model="tiny") for kind in ("prefill", "prefix_cache_hit")
    )
    assert shown.value("vllm:prompt_tokens_total", model_name="tiny") == sum(prompts) > 0
    finished = shown.by("finished_reason", "vllm:request_success_total", model_name="tiny")
    assert finished["length"] == shown.value("torch_stream_sequences_total", model="tiny", finish_reason="length")
    assert not on_rest_port(server).names("vllm:")


def test_counters_go_on_when_a_model_is_reloaded(server: Server) -> None:
    def counters() -> dict[tuple[str, str], float]:
        return {
            (each.name, str(sorted(each.labels.items()))): each.value
            for each in on_rest_port(server).samples
            if each.name.startswith("torch_stream_")
            and each.name.endswith(("_total", "_count", "_sum", "_bucket"))
            and each.labels.get("model") == "other"
        }

    def repository(action: str) -> None:
        url = f"{server.url}/v2/repository/models/other/{action}"
        plain_http.post(url, timeout=v2.TIMEOUT_S).raise_for_status()

    def generate() -> None:
        v2.rest_unary(server.url, "/v2/models/other/infer", v2.rest_body("Hello", max_tokens=4, ignore_eos=True))

    tokens = ("torch_stream_generation_tokens_total", str([("model", "other"), ("version", "")]))
    generate()
    settled(server, lambda now: not now.value("torch_stream_running_sequences", model="other"))
    seen = [counters()]
    for action in ("load", "unload", "load"):
        repository(action)
        seen.append(counters())
    generate()
    settled(server, lambda now: not now.value("torch_stream_running_sequences", model="other"))
    seen.append(counters())
    for earlier, later in pairwise(seen):
        assert all(later[key] >= value for key, value in earlier.items())
    assert seen[-1][tokens] == seen[0][tokens] + 4


@pytest.mark.long
def test_no_counter_falls_from_one_of_several_scrapes_in_flight_to_the_next(observed: Server) -> None:
    def counters(scrape: Scrape) -> dict[tuple[str, str], float]:
        totals = (each for each in scrape.samples if each.name.endswith(("_total", "_count", "_sum", "_bucket")))
        return {(each.name, str(each.labels)): each.value for each in totals}

    with ExitStack() as stack:
        scrapers = [stack.enter_context(closing(HTTPConnection(HOST, observed.http_port))) for _ in range(6)]
        for _ in range(4):  # rounds; nearly each of them fails if the scrapes run at the same time
            for scraper in scrapers:
                scraper.request("GET", "/metrics")
                time.sleep(0.003)  # so that the server sees them in this order
            shown = [counters(Scrape(scraper.getresponse().read().decode())) for scraper in scrapers]
            for earlier, later in pairwise(shown):
                assert {key: value for key, value in earlier.items() if later[key] < value} == {}


def test_health_is_readiness(observed: Server) -> None:
    health = plain_http.get(f"{observed.url}/health")
    assert (health.status_code, health.json()) == (200, {"ready": True})
