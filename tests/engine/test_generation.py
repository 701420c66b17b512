"""Whatever a model's generation config sets, the answer is that of ``generate``, or the load refuses it by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.loading.generation_config import generation_defaults, generation_rules, not_honoured
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import (
    EOS,
    VOCAB,
    byte_tokenizer,
    greedy,
    prompt_of,
    reference,
    run,
    running,
    tiny_model,
    tokens_of,
)

_DECODER = {"d_model": 32, "num_hidden_layers": 3, "decoder_layers": 3, "encoder_layers": 3, "decoder_ffn_dim": 48}
_DECODER |= {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "max_position_embeddings": 256}
OTHERS: dict[str, dict[str, Any]] = {
    "bart": _DECODER,
    "blenderbot": _DECODER,
    "blenderbot-small": _DECODER,
    "pegasus": _DECODER,
    "xlnet": {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48},
}


def other_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, vocab_size=VOCAB, **OTHERS[family])
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    return model.float().eval()


@pytest.mark.parametrize(
    "family",
    [
        "bart",
        "xlnet",
        *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS if each not in ("bart", "xlnet")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encoder_no_repeat_ngram_size.*:UserWarning")
def test_families_that_force_their_last_token_or_know_no_context_answer_as_in_generate(
    family: str, tmp_path: Path
) -> None:
    model = other_model(family)
    prompts = [prompt_of(5), prompt_of(17, 1), prompt_of(1, 2)]
    expected = [reference(model, prompt, 12) for prompt in prompts]
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    built = build_engine(
        parse_settings(str(tmp_path), {"threads": 1, "dtype": "float32"}, environ={}), resources=ProcessResources()
    )
    try:
        assert [run(tokens_of(built.engine, prompt, greedy(12))) for prompt in prompts] == expected
    finally:
        built.shutdown()


@pytest.mark.parametrize("prompt", [prompt_of(1), prompt_of(2), prompt_of(9)], ids=len)
@pytest.mark.parametrize(
    "asked",
    [
        {"forced_eos_token_id": EOS},
        {"forced_bos_token_id": 7},
        {"suppress_tokens": "said"},
        {"begin_suppress_tokens": "said"},
        {"begin_suppress_tokens": "said", "forced_bos_token_id": 7},
        {"bad_words_ids": "pairs"},
        {"forced_eos_token_id": EOS, "suppress_tokens": "said", "repetition_penalty": 1.3},
    ],
    ids=lambda asked: "-".join(asked),
)
def test_a_rule_gives_the_answer_of_generate(asked: dict[str, Any], prompt: tuple[int, ...]) -> None:
    model = tiny_model()
    said = reference(model, prompt, 8)
    tokens = {"said": said[:2], "pairs": [said[0:2], said[3:6]]}
    given = {key: tokens.get(value, value) if isinstance(value, str) else value for key, value in asked.items()}
    model.generation_config = GenerationConfig(**given)
    expected = reference(model, prompt, 8)
    rules, defaults = generation_rules(model.generation_config), generation_defaults(model.generation_config)
    assert not not_honoured(model.generation_config)
    with running(model, rules=rules) as engine:
        assert run(tokens_of(engine, prompt, greedy(8, **defaults))) == expected
    if len(prompt) == 1 or "forced_bos_token_id" not in asked:
        assert expected != said, "the rule does something"


def test_a_sampled_answer_is_under_the_same_rules() -> None:
    model = tiny_model()
    rules = generation_rules(GenerationConfig(suppress_tokens=list(range(100)), forced_eos_token_id=[EOS, 257]))
    with running(model, rules=rules) as engine:
        tokens = run(tokens_of(engine, prompt_of(5), greedy(20, temperature=3.0, seed=1)))
    assert len(tokens) == 20 and min(tokens) >= 100 and tokens[-1] in (EOS, 257)


def test_min_new_tokens_is_a_default_of_requests() -> None:
    assert generation_defaults(GenerationConfig(min_new_tokens=3)) == {"min_tokens": 3}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"max_length": 512, "num_beams": 1, "do_sample": True, "top_k": 3, "encoder_no_repeat_ngram_size": 3}, []),
        ({"guidance_scale": 1.0, "no_repeat_ngram_size": 0, "remove_invalid_values": False}, []),
        ({"epsilon_cutoff": 0.1}, []),
        ({"epsilon_cutoff": 0.1, "do_sample": True}, ["epsilon_cutoff 0.1"]),
        ({"no_repeat_ngram_size": 3, "num_beams": 4}, ["no_repeat_ngram_size 3", "num_beams 4"]),
        ({"guidance_scale": 1.5}, ["guidance_scale 1.5"]),
        ({"exponential_decay_length_penalty": (5, 1.1)}, ["exponential_decay_length_penalty (5, 1.1)"]),
        ({"sequence_bias": [[[3, 4], 1.0]]}, ["sequence_bias [[[3, 4], 1.0]]"]),
        ({"stop_strings": ["END"]}, ["stop_strings ['END']"]),
        ({"a_key_of_the_checkpoint": 7}, []),
    ],
)
def test_what_is_not_honoured_is_named(given: dict[str, Any], named: list[str]) -> None:
    assert not_honoured(GenerationConfig(**given)) == named


def test_the_load_says_what_is_not_honoured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.generation_config.no_repeat_ngram_size = 3
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    resolved = parse_settings(str(tmp_path), {"threads": 1, "fast_path": "off"}, environ={})
    with caplog.at_level(logging.WARNING):
        build_engine(resolved, resources=ProcessResources()).shutdown()
    assert "without effect here: no_repeat_ngram_size 3" in caplog.text
