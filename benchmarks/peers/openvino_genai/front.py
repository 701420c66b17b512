"""Serves ``/v1/completions`` as server-sent events with OpenVINO GenAI's ``ContinuousBatchingPipeline``, greedily.

    python front.py MODEL TOKENIZER.json PORT CACHE_GIB

A single thread steps the pipeline, writes the results of a step, and reads new requests in between. Because ``step``
holds Python's global lock, a second thread would gain nothing. Runs in the peer's own environment and imports nothing
of ours.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

import numpy as np
import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from tokenizers import Tokenizer

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TURNS = 8  # of the event loop between two steps, in which a new connection is read and its request added


class Stream:
    """One answer, whose tokens are written as events."""

    def __init__(self, handle: Any, writer: asyncio.StreamWriter, read: int, tokenizer: Tokenizer) -> None:
        self.ended = asyncio.Event()
        self._handle, self._writer, self._tokenizer = handle, writer, tokenizer
        self._read, self._written = read, 0

    def write(self) -> bool:
        """Writes the tokens of the last step. Returns False once the answer is complete."""
        while self._handle.can_read():
            for output in self._handle.read().values():
                self._written += len(output.generated_ids)
                text = self._tokenizer.decode(output.generated_ids, skip_special_tokens=False)
                self._event({"choices": [{"index": 0, "text": text}]})
        if "RUNNING" in str(self._handle.get_status()):
            return True
        usage = {"prompt_tokens": self._read, "completion_tokens": self._written}
        self._event({"choices": [], "usage": usage})
        self._writer.write(b"data: [DONE]\n\n")
        self.ended.set()
        return False

    def _event(self, event: Any) -> None:
        self._writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


class Front:
    def __init__(self, pipeline: ContinuousBatchingPipeline, tokenizer: Tokenizer) -> None:
        self._pipeline, self._tokenizer = pipeline, tokenizer
        self._numbers = itertools.count()
        self._streams: list[Stream] = []
        self._asked = asyncio.Event()

    async def step_for_ever(self) -> None:
        while True:
            if not self._pipeline.has_non_finished_requests():
                self._asked.clear()
                await self._asked.wait()
            self._pipeline.step()
            self._streams = [stream for stream in self._streams if stream.write()]
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((line for line in head.splitlines() if line.lower().startswith("content-length:")), ": 0")
        body = await reader.readexactly(int(length.partition(":")[2]))
        if head.startswith("GET"):
            writer.write(_HEALTHY)
        else:
            writer.write(_HEAD)
            await self._answer(json.loads(body), writer).ended.wait()
        await writer.drain()
        writer.close()

    def _answer(self, asked: Any, writer: asyncio.StreamWriter) -> Stream:
        ids = self._tokenizer.encode(asked["prompt"]).ids
        config = GenerationConfig(max_new_tokens=asked["max_tokens"], ignore_eos=True, do_sample=False)
        handle = self._pipeline.add_request(next(self._numbers), ov.Tensor(np.array([ids], dtype=np.int64)), config)
        stream = Stream(handle, writer, len(ids), self._tokenizer)
        self._streams.append(stream)
        self._asked.set()
        return stream


async def main(model: str, tokenizer: str, port: int, cache_gib: int) -> None:
    scheduling = SchedulerConfig()
    scheduling.cache_size = cache_gib
    scheduling.enable_prefix_caching = False
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    properties = {"INFERENCE_PRECISION_HINT": "bf16" if "BF16" in capabilities else "f32"}
    pipeline = ContinuousBatchingPipeline(model, scheduling, "CPU", properties)
    front = Front(pipeline, Tokenizer.from_file(tokenizer))
    server = await asyncio.start_server(front.serve, "127.0.0.1", port)
    async with server:
        await front.step_for_ever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
