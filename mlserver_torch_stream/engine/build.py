"""From settings to a running engine: load, check, choose the backend, size the cache, say what was done.

Knows nothing of MLServer. Blocks for as long as loading takes: call it in a thread.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from mlserver_torch_stream.engine.batched import BatchedBackend
from mlserver_torch_stream.engine.bounds import Bounds
from mlserver_torch_stream.engine.faults import VARIABLE, Faults, read_faults
from mlserver_torch_stream.engine.forward import Forward, input_device
from mlserver_torch_stream.engine.host import Host, read_host
from mlserver_torch_stream.engine.loader import LoadedModel, load_model, set_threads
from mlserver_torch_stream.engine.native.take import take_fast_path
from mlserver_torch_stream.engine.sampling import SamplerFactory
from mlserver_torch_stream.engine.selfcheck import Findings, check_batching
from mlserver_torch_stream.engine.serial import SerialBackend
from mlserver_torch_stream.engine.shares import PROCESS, Shares
from mlserver_torch_stream.engine.tokenizer import TextCodec
from mlserver_torch_stream.engine.worker import EngineWorker
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.types import ModelInfo

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256
# Of a GPU's free memory after loading; the rest is for activations and the allocator's fragments.
GPU_CACHE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A running engine, and one line that says what is loaded where and how much cache it has."""

    engine: EngineWorker
    codec: TextCodec
    info: ModelInfo
    summary: str
    shares: Shares

    def shutdown(self) -> None:
        """Stops the engine and gives its memory back. Blocks."""
        self.engine.shutdown()
        self.shares.release(self.codec)


def build_engine(resolved: ResolvedSettings, shares: Shares = PROCESS) -> BuiltEngine:
    """Loads what the settings name and starts its engine. Raises LoadFailed with one line that says why."""
    settings = resolved.settings
    threads = set_threads(settings, read_host())
    with torch.inference_mode():
        loaded = load_model(resolved)
        findings = Findings(problem="set by engine: serial")
        if settings.engine != "serial":
            findings = check_batching(loaded.model)
        forward: Forward | None = None
        if findings.cost is not None and settings.fast_path == "auto":
            forward = take_fast_path(loaded.model, threads, resolved.cache_dir)
    if findings.problem and settings.engine == "batched":
        raise LoadFailed(f"this model cannot be batched: {findings.problem}")
    codec = TextCodec(loaded.tokenizer)
    try:
        return _assemble(resolved, shares, loaded, findings, forward, codec, threads)
    except BaseException:
        shares.release(codec)
        raise


def _assemble(
    resolved: ResolvedSettings,
    shares: Shares,
    loaded: LoadedModel,
    findings: Findings,
    forward: Forward | None,
    codec: TextCodec,
    threads: int,
) -> BuiltEngine:
    settings = resolved.settings
    vocab_size = int(loaded.model.get_input_embeddings().weight.shape[0])
    samplers = SamplerFactory(codec, min(vocab_size, codec.vocab_size), loaded.eos_token_ids)
    context = loaded.max_context
    device = input_device(loaded.model)
    host = read_host()
    backend: BatchedBackend | SerialBackend
    if findings.cost is None:
        backend = SerialBackend(loaded.model, samplers, max_rows=settings.max_batch_rows)
        how = f"one request at a time ({findings.problem})"
    else:
        budget = _cache_budget(device, settings.kv_cache_memory, shares, codec, host)
        backend = BatchedBackend(
            loaded.model,
            samplers,
            cost=findings.cost,
            cache_bytes=budget,
            max_rows=settings.max_batch_rows,
            prefill_tokens=settings.prefill_chunk if findings.chunked else None,
            forward=forward,
            faults=_faults(),
        )
        context = backend.longest_row(context)
        if context < 2:
            raise LoadFailed(f"kv_cache_memory: {budget} bytes hold no row of this model")
        origin = resolved.origins["kv_cache_memory"]
        how = (
            f"{'our own kernels, ' if forward else ''}up to {settings.max_batch_rows} rows at a time, "
            f"KV cache {_size(budget)} "
            f"({origin if settings.kv_cache_memory else f'a share of what is free: {host.memory_origin}'})"
        )
    info = ModelInfo(
        vocab_size=min(vocab_size, codec.vocab_size),
        max_context=context,
        max_rows=settings.max_batch_rows,
        has_chat_template=codec.has_chat_template,
        default_sampling={"max_tokens": DEFAULT_MAX_TOKENS, **loaded.default_sampling},
    )
    origin = resolved.origins["threads"] if settings.threads else host.threads_origin
    return BuiltEngine(
        engine=EngineWorker(
            backend,
            codec,
            info,
            loaded.eos_token_ids,
            bounds=Bounds(
                settings.max_queue, settings.max_queue_tokens, settings.queue_timeout, settings.request_timeout
            ),
            threads=threads,
            turns=shares.cores if device.type == "cpu" else None,
            name=resolved.source.name,
        ),
        codec=codec,
        info=info,
        summary=f"{loaded.description}; {how}; context {context} tokens; {threads} threads ({origin})",
        shares=shares,
    )


def _cache_budget(device: torch.device, asked: int | None, shares: Shares, owner: object, host: Host) -> int:
    """Bytes. A GPU's own free memory already lacks what other engines on it have taken."""
    if device.type == "cuda":
        return asked or int(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_SHARE)
    return shares.promise(owner, asked, host.available_bytes)


def _faults() -> Faults | None:
    faults = read_faults(os.environ)
    if faults is not None:
        logger.warning("%s is set: this engine fails on purpose", VARIABLE)
    return faults


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
