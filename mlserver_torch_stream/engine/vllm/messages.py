"""Defines the messages between the server and vLLM's worker: frames with a JSON header, and prompts as raw 32-bit ids.

Both sides import this module, which imports only the standard library and two modules of this package that do the
same. Each side sends its protocol version in its first message. Nothing is unpickled. A frame that breaks these rules
raises ``BrokenFrame``.

The server sends ``start``, ``add``, ``abort``, ``load_adapter`` and ``unload_adapter``. The worker sends ``hello``,
then ``ready`` or ``refused``, then ``outputs`` once per wake-up and ``answered`` for each adapter call. If the worker
ends because vLLM has died, it sends ``died``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from mlserver_torch_stream.handlers.frames import BrokenFrame, encode_frame
from mlserver_torch_stream.log_text import log_text

PROTOCOL = 1
MAX_MESSAGE = 1 << 26  # bytes of the header and of the body of one message: 16 million ids
VERSIONS = ("0.30", "0.31", "0.32")  # the versions of vLLM that the worker can host
PYTHONS = ((3, 10), (3, 13))  # the oldest and the newest Python version that the worker runs on
REASONS = ("stop", "length", "abort", "error")  # why a sequence ends
_IDS = "I"
_MAX_ID = 2**32 - 1
_SEEDS = 2**63
_MAX_COUNT = 2**53 - 1  # a larger count would not be exact in a metric
_MAX_TEXT = 2000  # characters of a text that the other side has written
_MAX_QUOTE = 100  # characters of the reason why a message is malformed
_WRONG = (KeyError, TypeError, ValueError, OverflowError)  # what a message with wrong fields raises


@dataclass(frozen=True)
class Addition:
    """A request that the worker adds to vLLM. ``params`` are fields of vLLM's ``SamplingParams``.

    Its ``n`` sequences are numbered from ``number`` on. ``grammar`` is in Lark's language, ``bad_words`` are lists of
    token ids, ``adapter`` is the number of a loaded adapter, and ``salt`` is the salt for the prefix cache.
    """

    number: int
    prompt: Sequence[int]
    params: Mapping[str, Any]
    n: int = 1
    priority: int = 0
    grammar: str | None = None
    bad_words: Sequence[Sequence[int]] = ()
    adapter: int | None = None
    salt: str | None = None

    def params_of(self, index: int) -> dict[str, Any]:
        """Returns the parameters of the sequence ``index``, counted from 0. Each sequence has its own seed."""
        if "seed" not in self.params:
            return dict(self.params)
        return {**self.params, "seed": (self.params["seed"] + index) % _SEEDS}

    def encode(self) -> bytes:
        """Returns the frame of an ``add`` message: the parameters as JSON, and the prompt as raw 32-bit ids."""
        header = {name: getattr(self, name) for name in _ADDITION}
        return encode_frame({"t": "add", **header}, array(_IDS, self.prompt).tobytes())

    @classmethod
    def decode(cls, header: Mapping[str, Any], body: bytes) -> Addition:
        """Raises BrokenFrame if the message is malformed."""
        try:
            for name, kind in _ADDITION.items():
                if not isinstance(header[name], kind):
                    raise TypeError(f"{name} is {header[name]!r}")
            words = [[_id(token_id) for token_id in word] for word in header["bad_words"]]
            ids = array(_IDS)
            ids.frombytes(body)
        except _WRONG as error:
            raise malformed("add", error) from None
        return cls(prompt=ids.tolist(), **{**{name: header[name] for name in _ADDITION}, "bad_words": words})


_ADDITION: Mapping[str, Any] = {
    "number": int,
    "params": dict,
    "n": int,
    "priority": int,
    "grammar": str | None,
    "bad_words": list,
    "adapter": int | None,
    "salt": str | None,
}


class Logprobs(NamedTuple):
    """The log-probability of a token, and the ids and log-probabilities of the most likely tokens."""

    logprob: float
    top: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Output:
    """The new tokens of one sequence. If these are the sequence's last tokens, ``reason`` is one of ``REASONS``.

    ``cached`` is the number of tokens of the prompt that vLLM found in its prefix cache. ``error`` is the text for the
    client if the reason is ``error``; ``field`` is the wrong parameter, if the error is about one.
    """

    number: int
    token_ids: Sequence[int] = ()
    reason: str | None = None
    cached: int | None = None
    logprobs: Sequence[Logprobs] | None = None
    error: str | None = None
    field: str | None = None


@dataclass
class WorkerStats:
    """Gauges of vLLM's newest step, and counts since the last message."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # the share of the cache that is used, from 0 to 1
    steps: int = 0
    prefill_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


STATS = tuple(each.name for each in fields(WorkerStats))
COUNTS = STATS[3:]


def encode_outputs(outputs: Iterable[Output], stats: WorkerStats | None) -> bytes:
    """Returns the frame of an ``outputs`` message. ``stats`` are vLLM's counters, or None if none are sent."""
    rows = [
        [each.number, each.token_ids, each.reason, each.cached, each.logprobs, each.error, each.field]
        for each in outputs
    ]
    return encode_frame({"t": "outputs", "of": rows, "stats": None if stats is None else vars(stats)})


def decode_outputs(header: Mapping[str, Any]) -> tuple[list[Output], WorkerStats | None]:
    """Returns the outputs and the counters of an ``outputs`` message. Raises BrokenFrame if the message is
    malformed.
    """
    try:
        outputs = [_output(*row) for row in header["of"]]
        stats = header["stats"]
        return outputs, None if stats is None else _stats(stats)
    except _WRONG as error:
        raise malformed("outputs", error) from None


def _stats(given: Mapping[str, Any]) -> WorkerStats:
    counts = {name: _count(given[name]) for name in STATS if name != "kv_usage"}
    usage = float(given["kv_usage"])
    if not math.isfinite(usage):
        raise ValueError(f"kv_usage must be finite, got {usage!r}")
    return WorkerStats(**counts, kv_usage=min(max(usage, 0.0), 1.0))


def _output(
    number: int, token_ids: list[int], reason: str | None, cached: int | None, logprobs: Any, error: Any, field: Any
) -> Output:
    ids = [_id(token_id) for token_id in token_ids]
    if reason is not None and reason not in REASONS:
        raise ValueError(f"unknown reason {reason!r}")
    if logprobs is not None:
        logprobs = [Logprobs(_logprob(own), [(_id(at), _logprob(value)) for at, value in top]) for own, top in logprobs]
        if len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(ids)} tokens")
    found = None if cached is None else _count(cached)
    return Output(_count(number), ids, reason, found, logprobs, _text(error), _text(field))


def malformed(kind: str, error: Exception) -> BrokenFrame:
    """Returns the error for a message of this kind that lacks a field or has a field with a wrong value.

    Clients see the error, so it quotes only the beginning of the value.
    """
    return BrokenFrame(f"a malformed {kind!r} message: {type(error).__name__}: {in_line(error)[:_MAX_QUOTE]}")


def in_line(text: object) -> str:
    """Returns a text that the other side has written, or that quotes it, as one line of bounded length."""
    return log_text(str(text)[:_MAX_TEXT])


def _text(value: Any) -> str | None:
    return None if value is None else in_line(value)


def _count(value: Any, least: int = 0, most: int = _MAX_COUNT) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not an integer from {least} to {most}")
    return value


def _id(value: Any) -> int:
    return _count(value, most=_MAX_ID)


def _logprob(value: Any) -> float:
    """vLLM's value for an impossible token is minus infinity. Logits of a broken model can make it NaN."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no log-probability")
    return float(value)


@dataclass(frozen=True)
class Ready:
    """The worker's report on the model that it has loaded.

    ``kv_cache_bytes`` is 0 if vLLM does not report this size. ``missing`` has the numbers of the adapters that vLLM
    could not load, each with the reason.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int = 0
    kv_cache_bytes: int = 0
    device: str = ""
    vllm: str = ""
    missing: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, header: Mapping[str, Any], vllm: str) -> Ready:
        try:
            numbers = {name: _count(header[name], least) for name, least in _READY.items()}
            missing = {_count(number): in_line(why) for number, why in header.get("missing", ())}
        except _WRONG as error:
            raise malformed("ready", error) from None
        return cls(**numbers, device=in_line(header.get("device", "")), vllm=vllm, missing=missing)


_READY = {"vocab_size": 1, "max_model_len": 1, "max_num_seqs": 1, "kv_cache_tokens": 0, "kv_cache_bytes": 0}  # at least


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the name that requests use, the adapter's number in vLLM, and its folder or hub id."""

    name: str
    number: int
    path: str

    def message(self, call: int) -> dict[str, Any]:
        """Returns the message that loads the adapter; ``call`` numbers the worker's answer."""
        return {"t": "load_adapter", "call": call, "name": self.name, "id": self.number, "path": self.path}


@dataclass(frozen=True)
class StartOrder:
    """The first message to the worker. ``args`` are fields of vLLM's ``AsyncEngineArgs``.

    ``cpu_kv_cache_bytes`` is the size of the KV cache if vLLM runs on CPUs and ``args`` do not set it.
    """

    args: Mapping[str, Any]
    cpu_kv_cache_bytes: int = 0
    adapters: Sequence[Adapter] = field(default_factory=tuple)

    def encode(self) -> bytes:
        adapters = [vars(each) for each in self.adapters]
        return encode_frame(
            {
                "t": "start",
                "protocol": PROTOCOL,
                "args": self.args,
                "cpu_kv_cache_bytes": self.cpu_kv_cache_bytes,
                "adapters": adapters,
            }
        )

    @classmethod
    def decode(cls, header: Mapping[str, Any]) -> StartOrder:
        if header.get("t") != "start" or header.get("protocol") != PROTOCOL:
            raise BrokenFrame(f"the server uses protocol {header.get('protocol')!r}, not {PROTOCOL}")
        try:
            adapters = [Adapter(**each) for each in header["adapters"]]
            return cls(dict(header["args"]), int(header["cpu_kv_cache_bytes"]), adapters)
        except _WRONG as error:
            raise malformed("start", error) from None
