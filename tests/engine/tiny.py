"""Tiny random models of many families, a byte-level tokenizer, and engines over them."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.batching.batcher import Batcher
from mlserver_torch_stream.engine.batching.continuous import ContinuousBatcher
from mlserver_torch_stream.engine.batching.serial import SerialBatcher
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.loading.loader import LoadedModel, complete, load_tokenizer, load_weights, locate
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.kv_cache.page_counts import page_counts
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache
from tests.engine.measured import Measured as SelfCheckResult
from tests.engine.measured import check_batching
from mlserver_torch_stream.engine.process_resources import FairLock
from mlserver_torch_stream.engine.sampling.generation_rules import GenerationRules
from mlserver_torch_stream.engine.sampling.sampler_factory import SamplerFactory
from mlserver_torch_stream.engine.scheduling.queue_limits import QueueLimits
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import ModelInfo, SamplingParameters, TokenEvent

torch.set_num_threads(1)  # models of this size only lose time to a second core
EOS = 258
VOCAB = 259
CONTEXT = 256
_LAYERS = 3
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": EOS,
}
_GPT = {"n_embd": 32, "n_layer": _LAYERS, "n_head": 4, "n_positions": CONTEXT}
_WINDOW = {"sliding_window": 6}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": []},
    "mistral": {"head_dim": 8, **_WINDOW},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOW},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **_MIXED},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "olmo2": {},
    "granite": {},
    "cohere2": {"head_dim": 8, **_MIXED},
    "gpt2": _GPT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "bloom": {"n_layer": _LAYERS, "n_head": 4},
    "gptj": {**_GPT, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_layers": _LAYERS, "n_heads": 4, "max_seq_len": CONTEXT},
    "falcon": {"num_kv_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
}
# Families that the check at load must hand to the serial engine.
SERIAL_FAMILIES: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
}


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the family, with 3 layers of width 32, whose logits are far from ties.

    ``changes`` are copied: some config classes write into what they are given.
    """
    options = {**_BASE, **{**FAMILIES, **SERIAL_FAMILIES}.get(family, {"head_dim": 8}), **copy.deepcopy(changes)}
    if family in ("mamba2", "falcon"):
        options.pop("num_key_value_heads")
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens and three special ones: every text has tokens, most token sequences are no valid UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def reference(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy answer to one prompt alone."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in out[0, len(prompt) :]]


def load_model(resolved: ResolvedSettings) -> LoadedModel:
    """The model that ``resolved`` names, with its tokenizer, as an engine loads it."""
    files = locate(resolved)
    return complete(load_weights(files, resolved), load_tokenizer(files, resolved), resolved)


def batcher_over(
    model: PreTrainedModel,
    findings: SelfCheckResult | None = None,
    *,
    prefill_tokens: int | None = 4,
    cache_bytes: int = 2**24,
    prefix_bytes: int = 0,
    max_num_seqs: int = 8,
    page_size: int = 4,
    rules: GenerationRules | None = None,
    **more: Any,
) -> ContinuousBatcher:
    """A batcher over the model in the way that the check at load finds. ``more``: of ``ContinuousBatcher``."""
    with torch.inference_mode():
        findings = findings or check_batching(model)
    assert findings.spec is not None and findings.way is not None, findings.problem
    spec = replace(findings.spec, page_size=page_size)
    pages = page_counts(spec, cache_bytes, sequences=max_num_seqs, context=CONTEXT)
    limits = SchedulerLimits(
        max_num_seqs,
        prefill_tokens if findings.chunked else None,
        pages,
        cache_bytes,
        prefix_bytes,
        stages=1 if (pipeline := more.get("pipeline")) is None else pipeline.depth,
        whole_prompts=prefill_tokens is None or not findings.chunked,
    )
    cache = PagedCache(CacheLayout(model.config), page_size, pages, max_num_seqs)
    samplers = SamplerFactory(TextCodec(byte_tokenizer()), VOCAB, rules)
    forward = more.pop("forward", None) or ModelForward(model, findings.way)
    return ContinuousBatcher(forward, cache, samplers, limits, spec, **more)


@contextmanager
def running(
    model: PreTrainedModel,
    *,
    batcher: Batcher | None = None,
    max_num_seqs: int = 8,
    max_queued_requests: int = 64,
    max_queued_tokens: int | None = None,
    queue_timeout: float | None = None,
    step_timeout: float | None = None,
    context: int = CONTEXT,
    fair_lock: FairLock | None = None,
    eos_token_ids: tuple[int, ...] = (),
    rebuild: Callable[[], Batcher] | None = None,
    **more: Any,
) -> Iterator[EngineCore]:
    """An engine over the model, batched unless a batcher is given, that is shut down at the end.

    ``more``: of ``batcher_over``.
    """
    codec = TextCodec(byte_tokenizer())
    if batcher is None:
        batcher = batcher_over(model, max_num_seqs=max_num_seqs, **more)
        fits = (length for length in range(context, 0, -1) if batcher.refusal(1, length, length) is None)
        context = next(fits, 0)
    info = ModelInfo(vocab_size=VOCAB, max_model_len=context, max_num_seqs=max_num_seqs)
    queue_limits = QueueLimits(max_queued_requests, max_queued_tokens, queue_timeout, step_timeout=step_timeout)
    engine = EngineCore(
        *(batcher, codec, info, eos_token_ids),
        queue_limits=queue_limits,
        fair_lock=fair_lock,
        rebuild=rebuild,
        name="test",
    )
    try:
        yield engine
    finally:
        engine.shutdown()


async def collect(engine: EngineCore, requests: Sequence[EngineRequest]) -> dict[int, TokenEvent]:
    """All events of one submit, merged to one per sequence."""
    merged: dict[int, TokenEvent] = {}
    async for event in engine.submit(requests):
        merged[event.index] = merged[event.index].merge(event) if event.index in merged else event
    return merged


async def tokens_of(engine: EngineCore, prompt: Sequence[int], params: SamplingParameters) -> list[int]:
    events = await collect(engine, [EngineRequest(tuple(prompt), params)])
    assert events[0].error is None, events[0].error
    return list(events[0].token_ids)


def greedy(count: int, **changes: Any) -> SamplingParameters:
    return SamplingParameters(max_tokens=count, ignore_eos=True, **changes)


def run(coroutine: Any, timeout: float = 60) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, timeout)

    return asyncio.run(bounded())


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Byte tokens that differ from seed to seed; never a special one."""
    return tuple((seed * 31 + 7 * position) % 250 for position in range(length))


def one_by_one(model: PreTrainedModel, **options: Any) -> SerialBatcher:
    """The serial engine's backend over the model."""
    return SerialBatcher(model, SamplerFactory(TextCodec(byte_tokenizer()), VOCAB), max_num_seqs=8, **options)


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Waits for what the engine's thread will do; the bound is for a test that fails."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{what} never came")


def idle(engine: EngineCore) -> bool:
    stats = engine.stats()
    return stats.running_sequences == 0 and stats.waiting_requests == 0 and stats.kv_cache_bytes == 0


class Watch:
    """Sees every call of a model's embedding: the ids that go in. Can hold the engine's thread there, or raise."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.calls: list[list[list[int]]] = []
        self.fail: Callable[[list[list[int]]], BaseException | None] = lambda ids: None
        self._gate = threading.Event()
        self._gate.set()
        self._reached = threading.Event()
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._see)

    @property
    def steps(self) -> list[list[list[int]]]:
        """The calls of one token per row."""
        return [call for call in self.calls if len(call[0]) == 1]

    def _see(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        ids = args[0].tolist()
        self.calls.append(ids)
        self._reached.set()
        assert self._gate.wait(30), "nobody let the model go on"
        error = self.fail(ids)
        if error is not None:
            raise error

    async def hold(self) -> None:
        """Returns when the engine's thread stands inside a forward."""
        self._reached.clear()
        self._gate.clear()
        await until(self._reached.is_set, "a forward")

    def let_go(self) -> None:
        self._gate.set()

    def remove(self) -> None:
        self._gate.set()
        self._hook.remove()


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[Watch]:
    watch = Watch(model)
    try:
        yield watch
    finally:
        watch.remove()


def spelled(text: str) -> list[int]:
    """The text's ids, one per byte."""
    return [int(token) for token in byte_tokenizer().encode(text, add_special_tokens=False)]


@contextmanager
def dictated(model: PreTrainedModel, sequence: Sequence[int], prompt: int) -> Iterator[None]:
    """A model that says these tokens after any prompt of that length: a hook lifts each logit above all others."""

    def dictate(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        for row, position in enumerate(kwargs["position_ids"][:, -1].tolist()):
            output.logits[row, -1, sequence[(position + 1 - prompt) % len(sequence)]] = 1e4
        return output

    hook = model.register_forward_hook(dictate, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
