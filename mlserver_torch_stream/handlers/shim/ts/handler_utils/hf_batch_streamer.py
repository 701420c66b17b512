"""A streamer for transformers' ``generate`` that yields the texts of a whole batch, step by step."""

from __future__ import annotations

from typing import Any

from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer


class TextIteratorStreamerBatch(BaseStreamer):
    """Yields a list with one ``{"text": …}`` for each row, step by step, until the first row ends."""

    def __init__(
        self, tokenizer: Any, batch_size: int, skip_prompt: bool = False, timeout: float | None = None, **decode: Any
    ) -> None:
        self.batch_size = batch_size
        self.streamers = [TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode) for _ in range(batch_size)]
        self.streamer_iterators = [iter(streamer) for streamer in self.streamers]

    def put(self, value: Any) -> None:
        if value.shape[0] != self.batch_size:
            raise ValueError(f"the batch size is {self.batch_size}, but the tensor's shape is {tuple(value.shape)}")
        for row, streamer in enumerate(self.streamers):
            streamer.put(value[row : row + 1])

    def end(self) -> None:
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> TextIteratorStreamerBatch:
        return self

    def __next__(self) -> list[dict[str, str]]:
        texts = [next(iterator, None) for iterator in self.streamer_iterators]
        if any(text is None for text in texts):
            raise StopIteration
        return [{"text": text} for text in texts if text is not None]
