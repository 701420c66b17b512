"""Loads a model into vLLM: makes the engine arguments, starts the worker, and prepares the handling of text, which the
server does itself.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import find_adapter_config_file

from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.loading.generation_config import (
    eos_token_ids,
    generation_defaults,
    generation_rules,
    not_honoured,
)
from mlserver_torch_stream.engine.loading.model_files import ModelFiles, attempt
from mlserver_torch_stream.engine.loading.tokenizer_files import load_tokenizer
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.running_engine import OnDeath, RunningEngine, model_info, queue_limits
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.vllm.adapters import LoraAdapters
from mlserver_torch_stream.engine.vllm.messages import Ready, StartOrder
from mlserver_torch_stream.engine.vllm.sampling import SamplingWriter
from mlserver_torch_stream.engine.vllm.vllm_batcher import VllmBatcher
from mlserver_torch_stream.engine.vllm.vllm_process import VllmProcess, WorkerCommand, cores_of_this_process
from mlserver_torch_stream.engine_settings import MAX_ADAPTERS, VLLM_NAMES, EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import GenerationRules
from mlserver_torch_stream.work_threads import cancellation

logger = logging.getLogger(__name__)
ENV_PYTHON = "MLSERVER_TORCH_STREAM_VLLM_PYTHON"
_INSTALL = (
    "it needs an interpreter with vLLM: run `python3.11 -m venv vllm-env` and `vllm-env/bin/pip install vllm==0.32.0`, "
    'then set "vllm_python": "vllm-env/bin/python" in parameters.extra'
)
_CONVERT = (
    "vLLM does not serve GGUF files here: name the checkpoint that the file was made from, or convert the file with "
    "transformers: AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(other_folder), and the "
    "same for AutoTokenizer"
)
_VLLM = "vllm"  # the name of the attention, which vLLM chooses itself
_GUIDANCE = "guidance"  # vLLM's backend of structured output that reads the grammars of this package
_DELAYS_S = (1.0, 5.0, 20.0)  # before a restart after one death of the last ten minutes, after two, after more


def run_vllm(
    resolved: ResolvedSettings, threads: int, resources: ProcessResources, on_death: OnDeath | None
) -> RunningEngine:
    """Loads a model into vLLM, and returns its engine when the worker is ready. Blocks until then.

    ``threads`` is the number of cores for all ranks of the worker together. Raises LoadFailed if the load fails.
    """
    settings, source = resolved.settings, resolved.source
    if source.kind in ("embedded", "gguf"):
        raise LoadFailed(f"parameters.uri: {_CONVERT}")
    python = _interpreter(settings)
    attempt(source.name, lambda: _refuse_adapter(source.location, settings))
    files = ModelFiles(source.location, None)
    parsers = settings.tool_parser, settings.reasoning_parser
    codec = TextCodec(tokenizer := load_tokenizer(files, resolved), *parsers)
    try:
        generation_config = attempt(source.name, lambda: _generation_config(source.location, settings))
        if ignored := not_honoured(generation_config) + _first_token_rules(generation_rules(generation_config)):
            logger.warning("The model's generation config has fields without effect in vLLM: %s", ", ".join(ignored))
        memory = resources.promise(codec, settings.kv_cache_memory, read_host().available_bytes)
        command = _command(python, settings, source.location, threads, memory, f"vLLM of {source.name}")
        workers = _Workers(command, settings.lora_modules or {})
        batcher, ready = workers.first(codec, generation_rules(generation_config))
        if not ready.device.startswith("cpu"):
            resources.release(codec)
        codec.limit_prompts(ready.max_model_len)
        try:
            codec.prepare()
        except BaseException:
            batcher.close()
            raise
    except BaseException:
        resources.release(codec)
        raise
    info = model_info(
        codec,
        ready.vocab_size,
        ready.max_model_len,
        ready.max_num_seqs,
        {**generation_defaults(generation_config), **settings.default_sampling},
        _VLLM,
    )
    engine = EngineCore(
        batcher,
        codec,
        info,
        eos_token_ids(generation_config, tokenizer),
        queue_limits=queue_limits(settings),
        event_interval=settings.event_interval,
        rebuild=workers.next,
        on_death=on_death,
        name=source.name,
    )
    adapters = workers.adapters if (settings.vllm or {}).get("enable_lora") else None
    if adapters is not None:
        adapters.show_in(engine)
    cache = f"KV cache {ready.kv_cache_tokens} tokens; context {ready.max_model_len} tokens"
    summary = f"{source.name} by vLLM {ready.vllm} on {ready.device}; {cache}"
    return RunningEngine(engine, codec, summary, None, adapters=adapters)


class _Workers:
    """Starts one worker after another: a new worker starts only when no process of the previous worker is left."""

    def __init__(self, command: WorkerCommand, modules: Mapping[str, str]) -> None:
        self.adapters = LoraAdapters(modules, lambda: self._batcher)
        self._command = command
        self._batcher: VllmBatcher
        self._writer: SamplingWriter
        self._ready: Ready  # the first worker's
        self._worker: VllmProcess | None = None

    def first(self, codec: TextCodec, rules: GenerationRules) -> tuple[VllmBatcher, Ready]:
        worker = self._start()
        try:
            with cancellation().interrupted_by(worker.kill):
                self._ready = worker.ready.result()
            for adapter in self.adapters.loaded:
                if adapter.number in self._ready.missing:
                    why = self._ready.missing[adapter.number]
                    raise LoadFailed(f"parameters.extra.lora_modules: {adapter.name!r}: {why}")
        except BaseException:
            worker.wait()
            raise
        self._writer = SamplingWriter(codec, rules, self._ready.vocab_size)
        self._batcher = self._new_batcher(lambda: worker)
        self._batcher.begin()
        return self._batcher, self._ready

    def next(self, deaths: int) -> VllmBatcher:
        """Starts the next worker in the background. The more ``deaths`` there were lately, the later it starts."""
        delay = _DELAYS_S[min(deaths, len(_DELAYS_S)) - 1]
        logger.warning("%s is started again in %g s", self._command.name, delay)
        self._batcher = self._new_batcher(self._start)
        self._batcher.begin_in_thread(delay)
        return self._batcher

    def _new_batcher(self, start: Callable[[], VllmProcess]) -> VllmBatcher:
        return VllmBatcher(start, self._writer, self._ready, self.adapters)

    def _start(self) -> VllmProcess:
        if self._worker is not None:
            self._worker.wait()
        order = replace(self._command.order, adapters=self.adapters.loaded)
        self._worker = VllmProcess(replace(self._command, order=order))
        return self._worker


def _interpreter(settings: EngineSettings) -> str:
    python = settings.vllm_python or os.environ.get(ENV_PYTHON)
    if not python:
        raise LoadFailed(f"parameters.extra.vllm: {_INSTALL}")
    if not Path(python).is_file():
        raise LoadFailed(f"{ENV_PYTHON}: no such interpreter: {python}")
    return python


def _refuse_adapter(location: str, settings: EngineSettings) -> None:
    """Raises LoadFailed for a folder or a hub id with an adapter, unless ``lora_modules`` names this folder or id."""
    named = (settings.lora_modules or {}).values()
    if location not in named and find_adapter_config_file(location, revision=settings.revision) is not None:
        raise LoadFailed(
            "adapter_config.json belongs to an adapter, which vLLM does not apply to the model by itself: merge it "
            "into the weights and remove the file, or name its folder or hub id in parameters.extra.lora_modules"
        )


def _command(
    python: str, settings: EngineSettings, location: str, threads: int, memory: int, name: str
) -> WorkerCommand:
    args = engine_args(settings, location)
    backends = args.get("distributed_executor_backend"), args.get("data_parallel_backend")
    several = "ray" in backends or args.get("nnodes", 1) != 1
    sizes = [args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data")]
    ranks = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0  # 0: vLLM refuses the sizes
    return WorkerCommand(
        python,
        StartOrder(args, memory),
        name,
        cores_of_this_process(threads),
        1 if several else max(ranks, 1),
        several,
    )


def engine_args(settings: EngineSettings, location: str) -> dict[str, Any]:
    """Returns fields of vLLM's ``AsyncEngineArgs``.

    Raises LoadFailed for a grammar backend that cannot read our grammars.
    """
    given = dict(settings.vllm or {})
    structured = dict(given.pop("structured_outputs_config", None) or {})
    if structured.setdefault("backend", _GUIDANCE) != _GUIDANCE:
        raise LoadFailed(f"parameters.extra.vllm: structured_outputs_config: the backend must be {_GUIDANCE}")
    ours = {name: getattr(settings, key) for key, name in VLLM_NAMES.items() if key in settings.model_fields_set}
    defaults: dict[str, Any] = {"scheduling_policy": "priority", "disable_log_stats": True}
    if not settings.allow_pickle:
        defaults["load_format"] = "safetensors"
    if given.get("enable_lora"):  # all adapters stay in memory; a batch has at most ``max_loras`` of them
        slots = given.get("max_loras")
        defaults["max_cpu_loras"] = max(MAX_ADAPTERS, slots if isinstance(slots, int) else 0)
    own = {"model": location, "structured_outputs_config": structured}
    return {**defaults, **{name: value for name, value in ours.items() if value is not None}, **given, **own}


def _generation_config(location: str, settings: EngineSettings) -> Any:
    """Returns the model's own generation config, or else the one that transformers derives from the model's config."""
    revision = settings.revision or "main"
    try:
        return GenerationConfig.from_pretrained(location, revision=revision)
    except OSError:
        config = AutoConfig.from_pretrained(location, revision=revision, trust_remote_code=settings.trust_remote_code)
        return GenerationConfig.from_model_config(config)


def _first_token_rules(rules: GenerationRules) -> list[str]:
    """Returns the rules of a generation config that vLLM cannot follow."""
    given = {
        "begin_suppress_tokens": rules.suppressed_first,
        "forced_bos_token_id": rules.forced_bos,
        "forced_eos_token_id": rules.forced_eos,
    }
    return [f"{name} {list(ids)!r}" for name, ids in given.items() if ids]
