"""Request parameters: their ranges, formats, levels and defaults."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.parameters import PARAMETERS
from mlserver_torch_stream.protocol.request_options import check_defaults, read_defaults
from mlserver_torch_stream.protocol.v2_request import decode_request
from mlserver_torch_stream.types import ModelInfo, SamplingParameters
from tests.protocol.wire import T, Wire, over_grpc, over_rest, text

_DEFAULT = SamplingParameters(max_tokens=256)  # of an answer to a prompt


def sampling(payload: InferenceRequest, info: ModelInfo) -> SamplingParameters:
    return decode_request(payload, info, streaming=False, request_id="r").sampling


def with_parameters(info: ModelInfo, **parameters: Any) -> SamplingParameters:
    return sampling(over_rest(text("x"), parameters=parameters), info)


def refused(info: ModelInfo, *tensors: T, **parameters: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        sampling(over_rest(text("x"), *tensors, parameters=parameters), info)
    return caught.value


GOOD = [
    ("max_tokens", 5, {"max_tokens": 5}),
    ("max_new_tokens", 5, {"max_tokens": 5}),
    ("max_completion_tokens", 5.0, {"max_tokens": 5}),
    ("min_tokens", 0, {"min_tokens": 0}),
    ("temperature", 0.5, {"temperature": 0.5}),
    ("repetition_penalty", 1.2, {"repetition_penalty": 1.2}),
    ("presence_penalty", -2, {"presence_penalty": -2.0}),
    ("frequency_penalty", 2, {"frequency_penalty": 2.0}),
    ("logit_bias", {"7": -100, "8": 1.5}, {"logit_bias": {7: -100.0, 8: 1.5}}),
    ("stop", "END", {"stop": ("END",)}),
    ("stop", "[no list", {"stop": ("[no list",)}),
    ("stop", "[]", {"stop": ("[]",)}),
    ("stop", ["a", "b"], {"stop": ("a", "b")}),
    ("stop_words", ["a"], {"stop": ("a",)}),
    ("bad_words", ["damn"], {"bad_words": ("damn",)}),
    ("stop_token_ids", [3, 4], {"stop_token_ids": (3, 4)}),
    ("eos_token_id", 9, {"eos_token_ids": (9,)}),
    ("include_stop_str_in_output", True, {"include_stop_str_in_output": True}),
    ("ignore_eos", True, {"ignore_eos": True}),
    ("skip_special_tokens", False, {"skip_special_tokens": False}),
    ("seed", 42, {"seed": 42}),
    ("random_seed", -1, {"seed": 2**63 - 1}),
    ("seed", 2**64 - 1, {"seed": 2**63 - 1}),
    ("n", 4, {"n": 4}),
    ("logprobs", True, {"logprobs": True, "top_logprobs": 0}),
    ("logprobs", 3, {"logprobs": True, "top_logprobs": 3}),
    ("logprobs", 0, {"logprobs": True, "top_logprobs": 0}),
    ("logprobs", False, {"logprobs": False}),
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_a_parameter_fills_its_field(info: ModelInfo, key: str, value: Any, expected: dict[str, Any]) -> None:
    assert with_parameters(info, **{key: value}) == replace(_DEFAULT, **expected)


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_over_grpc_the_same_value_may_be_a_string(
    info: ModelInfo, key: str, value: Any, expected: dict[str, Any]
) -> None:
    as_string = value if isinstance(value, str) else json.dumps(value)
    if key == "max_completion_tokens":
        as_string = "5"
    payload = over_grpc(text("x"), parameters={key: as_string})
    assert sampling(payload, info) == replace(_DEFAULT, **expected)


BAD = [
    ("max_tokens", 0), ("max_tokens", True), ("max_tokens", 1.5), ("max_tokens", "many"), ("max_tokens", [1]),
    ("min_tokens", -1), ("temperature", -0.1), ("temperature", 101), ("temperature", "nan"), ("temperature", True),
    ("temperature", 10**400), ("temperature", "1e999"), ("temperature", "1_0"), ("temperature", float("nan")),
    ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1),
    ("min_p", 1.1), ("typical_p", 0), ("repetition_penalty", 0), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("logit_bias", {"100": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": True}), ("logit_bias", [1]), ("logit_bias", "{"), ("logit_bias", {"1": 1, "01": 2}),
    ("stop", ""), ("stop", [""]), ("stop", ["a"] * 17), ("stop", 3), ("stop", [3]), ("stop_token_ids", [100]),
    ("stop_token_ids", [True]), ("stop_token_ids", "[x"), ("eos_token_id", -1), ("ignore_eos", 1),
    ("ignore_eos", "yes"), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", "1.5"), ("n", 0), ("n", 5),
    ("logprobs", 21), ("logprobs", -1), ("logprobs", "x"), ("top_logprobs", 21), ("stream_mode", "both"),
    ("sampling_parameters", "nonsense"), ("llm_parameters", [1]), ("kwargs", 3),
    ("stop", "a" * 4097), ("stop", ["é" * 1025, "b" * 2047]), ("bad_words", ["a" * 4000, "b" * 97]),
    ("stop_token_ids", [1] * 4097), ("eos_token_id", [1] * 4097),
    ("logit_bias", {str(token): 1 for token in range(4097)}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_value_out_of_range_is_refused_by_name(info: ModelInfo, key: str, value: Any) -> None:
    payload = InferenceRequest.model_validate(
        {
            "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}],
            "parameters": {key: value},
        }
    )
    with pytest.raises(InvalidInput) as caught:
        sampling(payload, info)
    assert caught.value.field == key


def test_the_client_sees_its_own_spelling(info: ModelInfo) -> None:
    assert refused(info, max_new_tokens=0).field == "max_new_tokens"


def test_an_unknown_key_is_named_with_its_nearest_neighbour_at_every_level(info: ModelInfo) -> None:
    for parameters in (
        {"temprature": 1},
        {"sampling_parameters": {"temprature": 1}},
        {"llm_parameters": {"temprature": 1}},
        {"kwargs": {"temprature": 1}},
    ):
        error = refused(info, **parameters)
        assert error.field == "temprature"
        assert "did you mean temperature?" in error.message
    assert refused(info, sampling_parameters={"\ud800": 1}).message.encode()


@pytest.mark.parametrize(
    "key",
    ["guided_whitespace_pattern", "lora_name", "details", "sequence_id", "sequence_start"],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(info: ModelInfo, key: str) -> None:
    error = refused(info, **{key: 1})
    assert error.field == key
    assert "not implemented" in error.message


def test_a_default_of_something_unimplemented_asks_for_nothing(info: ModelInfo) -> None:
    body = {"response_format": {"type": "text"}, "service_tier": "auto", "best_of": 1, "user": "u", "model": "m"}
    assert with_parameters(info, llm_parameters=body) == _DEFAULT


def test_transport_parameters_pass_silently(info: ModelInfo) -> None:
    passed = {"headers": {"a": "b"}, "content_type": "str", "binary_data_output": True}
    assert with_parameters(info, **passed) == _DEFAULT


def test_a_double_that_grpc_lost_is_refused_rather_than_ignored(info: ModelInfo) -> None:
    for key, reason in (("temperature", "as a string"), ("guided_json", "as a string"), ("tempratur", "unknown")):
        with pytest.raises(InvalidInput, match=reason) as caught:
            sampling(over_grpc(text("x"), parameters={key: 0.5}), info)
        assert caught.value.field == key


def test_each_level_hides_those_below_it(wire: Wire, info: ModelInfo) -> None:
    info = replace(info, default_sampling={"max_tokens": 1})
    levels: list[tuple[list[T], dict[str, Any]]] = [
        ([], {}),
        ([], {"llm_parameters": {"max_tokens": 2}, "kwargs": {"max_completion_tokens": 2}}),
        ([], {"max_new_tokens": 3}),
        ([T("max_tokens", "INT32", [4], [1, 1])], {}),
        ([text('{"max_tokens": 5}', name="sampling_parameters")], {}),
    ]
    tensors: list[T] = []
    parameters: dict[str, Any] = {}
    for expected, (more_tensors, more_parameters) in enumerate(levels, start=1):
        tensors += more_tensors
        parameters.update(more_parameters)
        assert sampling(wire(text("x"), *tensors, parameters=parameters), info).max_tokens == expected


def test_two_spellings_at_one_level_must_agree(info: ModelInfo) -> None:
    assert with_parameters(info, max_tokens=5, max_new_tokens=5).max_tokens == 5
    error = refused(info, max_tokens=5, max_new_tokens=6)
    assert "max_tokens" in error.message
    assert "max_new_tokens" in error.message
    assert refused(info, llm_parameters={"seed": 1}, kwargs={"random_seed": 2}).field == "random_seed"
    assert refused(info, T("seed", "INT64", [1]), T("random_seed", "INT64", [2])).field == "random_seed"
    assert refused(info, llm_parameters={"seed": 1}, kwargs={"seed": 2}).field == "seed"


def test_a_hidden_level_is_validated_all_the_same(info: ModelInfo) -> None:
    assert refused(info, max_tokens=5, llm_parameters={"max_tokens": -1}).field == "max_tokens"


def test_scalar_tensors_are_parameters(wire: Wire, info: ModelInfo) -> None:
    payload = wire(
        text("x"),
        T("max_tokens", "INT32", [7]),
        T("temperature", "FP32", [0.5]),
        T("top_p", "FP64", [0.25], [1, 1]),
        T("top_k", "UINT32", [3]),
        T("random_seed", "UINT64", [2**63 + 5]),
        T("stop_words", "BYTES", ["END", "FIN"], [1, 2]),
        T("bad_words", "BYTES", ["no"]),
    )
    expected = SamplingParameters(
        max_tokens=7, temperature=0.5, top_p=0.25, top_k=3, seed=5, stop=("END", "FIN"), bad_words=("no",)
    )
    assert sampling(payload, info) == expected


def test_a_scalar_tensor_of_the_wrong_type_or_size_is_refused(wire: Wire, info: ModelInfo) -> None:
    for tensor in (T("max_tokens", "FP32", [7.0]), T("max_tokens", "INT64", [7, 8]), T("temperature", "BOOL", [True])):
        with pytest.raises(InvalidInput) as caught:
            sampling(wire(text("x"), tensor), info)
        assert caught.value.field == tensor.name


# The parameters that the meaning of ``top_p`` names.
FILTERS = re.findall(
    r"`(\w+)`", next(each for each in PARAMETERS if each.name == "top_p").meaning.partition("`temperature`, ")[2]
)


@pytest.mark.parametrize("key", FILTERS)
def test_naming_a_sampling_parameter_means_sampling(info: ModelInfo, key: str) -> None:
    value = 1 if key != "min_p" else 0.5
    assert with_parameters(info, **{key: value}).temperature == 1.0
    warm = replace(info, default_sampling={"temperature": 0.6})
    assert with_parameters(warm, **{key: value}).temperature == 0.6
    cold = replace(info, default_sampling={"temperature": 0})
    assert with_parameters(cold, **{key: value}).temperature == 1.0
    assert with_parameters(warm, **{key: value, "temperature": 0}).greedy


def test_defaults_mean_sampling_by_naming_it_unless_do_sample_says_no(info: ModelInfo) -> None:
    default = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    as_default = replace(_DEFAULT, temperature=0.6, top_p=0.9, top_k=20)
    for loud in (default, {**default, "do_sample": True}):
        assert with_parameters(replace(info, default_sampling=loud)) == as_default
        assert with_parameters(replace(info, default_sampling=loud), temperature=0).greedy
    quiet = replace(info, default_sampling={**default, "do_sample": False})
    assert with_parameters(quiet).greedy
    assert with_parameters(quiet, temperature=0.3) == replace(as_default, temperature=0.3)
    assert with_parameters(replace(info, default_sampling={"do_sample": True})).temperature == 1.0
    assert with_parameters(replace(info, default_sampling={"top_p": 0.9})).temperature == 1.0
    assert with_parameters(replace(info, default_sampling={"max_tokens": 9, "repetition_penalty": 1.1})).greedy


def test_every_field_of_the_vocabulary_can_be_a_default(info: ModelInfo) -> None:
    defaults = {
        field.name: getattr(_DEFAULT, field.name)
        for field in fields(SamplingParameters)
        if field.name not in ("stop", "bad_words", "stop_token_ids")
    }
    assert with_parameters(replace(info, default_sampling={**defaults, "stop": ["END"]})).stop == ("END",)


def test_wrong_defaults_are_found_when_they_are_read(info: ModelInfo) -> None:
    assert read_defaults(replace(info, default_sampling={"max_new_tokens": 9, "top_k": None})).keys() == {"max_tokens"}
    for wrong in ({"temperature": -1}, {"penalty_alpha": 0.6}):
        with pytest.raises(InvalidInput, match="default_sampling"):
            read_defaults(replace(info, default_sampling=wrong))


def test_top_k_off_has_two_spellings(info: ModelInfo) -> None:
    assert with_parameters(info, top_k=-1).top_k == with_parameters(info, top_k=0).top_k == 0


def test_min_tokens_cannot_exceed_max_tokens(info: ModelInfo) -> None:
    assert with_parameters(info, min_tokens=3, max_tokens=3).min_tokens == 3
    assert refused(info, min_tokens=4, max_tokens=3).field == "min_tokens"
    short = replace(info, default_sampling={"max_tokens": 3})
    assert refused(short, min_tokens=4).field == "min_tokens"


def test_top_logprobs_needs_logprobs(info: ModelInfo) -> None:
    both = with_parameters(info, logprobs=True, top_logprobs=2)
    assert (both.logprobs, both.top_logprobs) == (True, 2)
    assert refused(info, top_logprobs=2).field == "top_logprobs"
    assert refused(info, logprobs=1, top_logprobs=2).field == "top_logprobs"
    assert with_parameters(info, top_logprobs=0).logprobs is False


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (True, 3)),
        ({"logprobs": False}, (False, 0)),
        ({"logprobs": True}, (True, 3)),
        ({"logprobs": 5}, (True, 5)),
        ({"logprobs": 0}, (True, 0)),
        ({"top_logprobs": 2}, (True, 2)),
        ({"top_logprobs": 0}, (True, 0)),
        ({"logprobs": True, "top_logprobs": 4}, (True, 4)),
    ],
)
@pytest.mark.parametrize("default", [{"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}])
def test_a_request_may_want_other_logprobs_than_the_default(
    info: ModelInfo, default: dict[str, Any], asked: dict[str, Any], expected: tuple[bool, int]
) -> None:
    if default == {"logprobs": 3} and asked == {"logprobs": True}:
        expected = (True, 0)  # it is the same parameter, said anew
    sampling = with_parameters(replace(info, default_sampling=default), **asked)
    assert (sampling.logprobs, sampling.top_logprobs) == expected


def test_defaults_that_contradict_each_other_are_refused(info: ModelInfo) -> None:
    with pytest.raises(InvalidInput, match="contradicts logprobs"):
        check_defaults(replace(info, default_sampling={"logprobs": 3, "top_logprobs": 2}))


def test_null_inside_a_body_means_not_given(info: ModelInfo) -> None:
    body = {"temperature": None, "stop": None, "n": None}
    assert with_parameters(info, sampling_parameters=body, llm_parameters=body) == _DEFAULT


@pytest.mark.parametrize("wrong", [{"top_p": 7}, {"n": 1000}, {"stop_token_ids": [10**9]}, {"top_logprobs": 3}])
def test_defaults_that_no_request_could_be_served_with_are_found_without_one(
    info: ModelInfo, wrong: dict[str, Any]
) -> None:
    check_defaults(info)
    with pytest.raises(InvalidInput, match=rf"default_sampling: {next(iter(wrong))}: "):
        check_defaults(replace(info, default_sampling=wrong))


def test_a_default_min_tokens_gives_way_to_max_tokens(info: ModelInfo) -> None:
    info = replace(info, default_sampling={"min_tokens": 50, "max_tokens": 100})
    assert with_parameters(info, max_tokens=5).min_tokens == 5
    assert with_parameters(info).min_tokens == 50
    assert refused(info, min_tokens=101).field == "min_tokens"
