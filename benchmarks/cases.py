"""The cases by name: what is asked in each, and how a run of it becomes figures.

c16          16 prompts of 128 tokens at once, 128 new tokens each; several waves where one is over in a second
p2000        one prompt of 2,000 tokens on an idle server
p2000-again  the same, when another prompt with the same beginning was answered just before
c32+p2000    31 running streams, then one prompt of 2,000 tokens: its TTFT, and the ITL of the others meanwhile
c2+32p16     one running stream, then 32 prompts of 16 tokens at once
c2+16p128-2000  one running stream, then 16 prompts of 128 to 2,000 tokens at once: what ``step_target`` bounds
mix          prompts of 32 to 1,500 tokens, answers of 16 to 400, arriving at random
loop16       16 always in flight: prompts of 32 to 2,000 tokens, answers of 16 to 512
copy         one stream after another that is to repeat what its prompt says twice: what prompt lookup is for
prose        one stream after another that goes on with a page of a book: what prompt lookup is not for
prose-drawn  the same, with a temperature of 0.8
c16-list     16 answers at once that are kept to a JSON list, at the temperature 0.8; c16-free the same without a form
turns16      16 short streams at once, the same in turn, and the latency of liveness beside 16 streams
batch24      24 requests in turn, alone and while a batch of /v1/batches runs: the time to their first tokens
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import load
from benchmarks.answers import Answer, Ask, check_all
from benchmarks.beside_batch import beside_batch
from benchmarks.figures import Figures, disturbance, span, spread, summarize
from benchmarks.load import Endpoint
from benchmarks.process import Usage
from benchmarks.prompts import Prompts
from benchmarks.recording import Recording

DEFAULT = (
    *("c1", "c4", "c16", "c32", "c128", "p128", "p512", "p2000"),
    *("p2000-again", "c32+p2000", "c2+32p16", "mix", "loop16"),
)
_DRAWN = 0.8  # the temperature of prose that is drawn
_LIST = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 100}  # longer than an answer
_SERIAL_STREAMS = 4  # enough to see a queue
_NAME = re.compile(
    r"c(?P<streams>\d+)(\+(?P<many>\d+)?p(?P<late>\d+)(-(?P<longest>\d+))?)?|p(?P<prompt>\d+)(?P<again>-again)?|(?P<mix>mix)|loop(?P<loop>\d+)"
    r"|(?P<copy>copy)|(?P<prose>prose)(?P<drawn>-drawn)?|c(?P<kept>\d+)-(?P<form>list|free)|turns(?P<turns>\d+)"
    r"|batch(?P<batch>\d+)"
)


@dataclass(frozen=True)
class Scale:
    """How much is asked; ``--quick`` asks less."""

    prompt_tokens: int = 128
    new_tokens: int = 128
    wave_streams: int = 8  # waves until so many streams have run, at least one
    late_new_tokens: int = 16  # of the prompt that comes late
    running_new_tokens: int = 256  # of the streams that it finds running
    outlasting_new_tokens: int = 48  # of these for each prompt, where prompts have several lengths
    mix_requests: int = 48
    mix_per_s: float = 2.0
    mix_prompts: tuple[int, int] = (32, 1500)
    mix_answers: tuple[int, int] = (16, 400)
    batch_rows: int = 1000
    loop_requests: int = 64
    loop_prompts: tuple[int, int] = (32, 2000)
    loop_answers: tuple[int, int] = (16, 512)


QUICK = Scale(
    new_tokens=8, wave_streams=2, late_new_tokens=2, running_new_tokens=48, outlasting_new_tokens=16,
    mix_requests=6, mix_per_s=4.0, mix_prompts=(32, 200), mix_answers=(4, 16), batch_rows=60,
    loop_requests=6, loop_prompts=(32, 200), loop_answers=(4, 16),
)  # fmt: skip


class UnknownCase(ValueError):
    """A name that is no case."""


@dataclass(frozen=True)
class Case:
    """One case, ready to be run any number of times: ``sweep`` gives each time prompts of its own."""

    name: str
    scale: Scale
    prompts: Prompts

    @property
    def needs_batching(self) -> bool:
        """A server that answers one request at a time shows nothing in it but its queue, for many minutes."""
        match = _match(self.name)
        special = any(match[name] for name in ("mix", "loop", "late", "kept", "turns", "batch"))
        return special or int(match["streams"] or 1) > _SERIAL_STREAMS

    @property
    def streams(self) -> int:
        """As many as run at once, at the most."""
        match = _match(self.name)
        return max(int(match[name] or 1) for name in ("streams", "many", "loop", "kept", "turns"))

    async def run(self, endpoint: Endpoint, pid: int, sweep: object) -> Figures:
        """``sweep`` names this run: no other has its prompts. Raises WrongCount or BadAnswer."""
        match = _match(self.name)
        if match["mix"]:
            return await self._mix(endpoint, pid, sweep)
        if match["copy"] or match["prose"]:
            ask = self._copy if match["copy"] else partial(self._prose, _DRAWN if match["drawn"] else 0.0)
            return await self._waves(endpoint, pid, [[ask(sweep, wave)] for wave in range(self.scale.wave_streams)])
        if match["turns"]:
            return await self._turns(endpoint, sweep, int(match["turns"]))
        if match["batch"]:
            return await beside_batch(endpoint, self.scale, self.prompts, int(match["batch"]), sweep)
        if match["kept"]:
            form = _LIST if match["form"] == "list" else None
            asks = [replace(self._ask(self.scale.prompt_tokens, sweep, index), temperature=_DRAWN, schema=form)
                    for index in range(int(match["kept"]))]  # fmt: skip
            return await self._waves(endpoint, pid, [asks])
        if match["loop"]:
            return await self._loop(endpoint, pid, sweep, int(match["loop"]))
        if match["late"]:
            many = int(match["many"] or 1)
            if match["longest"]:
                dice = random.Random(13)  # the same lengths in every sweep and for every server
                sizes = [_log_uniform(dice, int(match["late"]), int(match["longest"])) for _ in range(many)]
                outlasting = max(self.scale.running_new_tokens, many * self.scale.outlasting_new_tokens)
                return await self._late(endpoint, pid, sweep, int(match["streams"]), sizes, outlasting)
            sizes = [int(match["late"])] * many
            return await self._late(endpoint, pid, sweep, int(match["streams"]), sizes, self.scale.running_new_tokens)
        if match["again"]:
            return await self._again(endpoint, pid, sweep, int(match["prompt"]))
        if match["prompt"]:
            return await self._waves(endpoint, pid, [[self._ask(int(match["prompt"]), sweep)]])
        streams = int(match["streams"])
        waves = max(1, self.scale.wave_streams // streams)
        size = self.scale.prompt_tokens
        asked = [[self._ask(size, sweep, wave, index) for index in range(streams)] for wave in range(waves)]
        return await self._waves(endpoint, pid, asked)

    async def _waves(self, endpoint: Endpoint, pid: int, asked: Sequence[Sequence[Ask]]) -> Figures:
        async with Usage(pid) as usage:
            recorded = [await load.together(endpoint, asks) for asks in asked]
        waves = [_read(endpoint, asks, recordings) for asks, recordings in zip(asked, recorded, strict=True)]
        return {**summarize(waves), **usage.figures}

    async def _late(
        self, endpoint: Endpoint, pid: int, sweep: object, streams: int, late_sizes: Sequence[int], running_new: int
    ) -> Figures:
        """``late_sizes``: tokens of the late prompts. ``running_new``: new tokens of each running stream."""
        size = self.scale.prompt_tokens
        asks = [self._ask(size, sweep, index, new=running_new) for index in range(streams - 1)]
        new = self.scale.late_new_tokens
        late = [self._ask(tokens, sweep, "late", index, new=new) for index, tokens in enumerate(late_sizes)]
        async with Usage(pid) as usage:
            recordings, intruders = await load.intrusion(endpoint, asks, late)
        answers, late_answers = _read(endpoint, asks, recordings), _read(endpoint, late, intruders)
        return {**disturbance(answers, late_answers), **usage.figures}

    async def _again(self, endpoint: Endpoint, pid: int, sweep: object, tokens: int) -> Figures:
        """Two prompts that differ in their last tokens only."""
        text, _ = self.prompts.text(tokens, self.name, sweep)
        endings = [f"{text} {ending}" for ending in ("And then it rained.", "The next day was dry.")]
        first, second = [Ask(each, self.prompts.count(each), self.scale.new_tokens) for each in endings]
        _read(endpoint, [first], await load.together(endpoint, [first]))
        return await self._waves(endpoint, pid, [[second]])

    async def _mix(self, endpoint: Endpoint, pid: int, sweep: object) -> Figures:
        scale = self.scale
        dice = random.Random(7)  # the same lengths and arrivals in every sweep and for every server
        asks, offsets, now = [], [], 0.0
        for index in range(scale.mix_requests):
            new_tokens = _log_uniform(dice, *scale.mix_answers)
            asks.append(self._ask(_log_uniform(dice, *scale.mix_prompts), sweep, index, new=new_tokens))
            offsets.append(now)
            now += dice.expovariate(scale.mix_per_s)
        async with Usage(pid) as usage:
            recordings = await load.at_times(endpoint, asks, offsets)
        return {**summarize([_read(endpoint, asks, recordings)]), **usage.figures}

    async def _loop(self, endpoint: Endpoint, pid: int, sweep: object, streams: int) -> Figures:
        scale = self.scale
        dice = random.Random(11)  # the same lengths in every sweep and for every server
        asks = [
            self._ask(
                _log_uniform(dice, *scale.loop_prompts), sweep, index, new=_log_uniform(dice, *scale.loop_answers)
            )
            for index in range(scale.loop_requests)
        ]
        async with Usage(pid) as usage:
            recordings = await load.always(endpoint, asks, streams)
        return {**summarize([_read(endpoint, asks, recordings)]), **usage.figures}

    async def _turns(self, endpoint: Endpoint, sweep: object, streams: int) -> Figures:
        scale = self.scale
        tokens = scale.new_tokens // 2

        def asks(*label: object, new: int = tokens) -> list[Ask]:
            return [self._ask(16, sweep, *label, index, new=new) for index in range(streams)]

        await load.together(endpoint, asks("warm"))
        together, in_turn = asks("together"), asks("in turn")
        at_once = _read(endpoint, together, await load.together(endpoint, together))
        one_by_one = _read(endpoint, in_turn, await load.in_turn(endpoint, in_turn))
        running = asyncio.ensure_future(load.together(endpoint, asks("live", new=3 * tokens)))
        latencies = await load.probe_health(endpoint.port, running)
        await running
        seconds = {"together_s": span(at_once), "in_turn_s": span(one_by_one)}
        ratio = seconds["together_s"] / seconds["in_turn_s"]
        return {"streams": streams, "new_tokens": tokens, **seconds, "ratio": ratio, **spread("health", latencies)}

    def _copy(self, *label: object) -> Ask:
        text, _ = self.prompts.text(self.scale.prompt_tokens, self.name, *label)
        twice = f"{text}\n\n{text}\n\n"
        return Ask(twice, self.prompts.count(twice), self.scale.new_tokens)

    def _prose(self, temperature: float, *label: object) -> Ask:
        return Ask(*self.prompts.passage(self.scale.prompt_tokens, *label), self.scale.new_tokens, temperature)

    def _ask(self, tokens: int, *label: object, new: int | None = None) -> Ask:
        return Ask(*self.prompts.text(tokens, self.name, *label), new or self.scale.new_tokens)


def make_cases(names: Sequence[str], scale: Scale, prompts: Prompts) -> list[Case]:
    """Raises UnknownCase."""
    return [Case(_match(name)[0], scale, prompts) for name in names]


async def warm_up(endpoint: Endpoint, scale: Scale, prompts: Prompts, streams: int) -> None:
    """So that nothing is done for the first time while it is measured: alone, in a batch, and a long prompt.

    The batch has the lengths of the cases, so that a server that grows its KV cache as it is written has grown it.
    """
    for count, tokens in ((1, scale.prompt_tokens), (streams, scale.prompt_tokens), (1, 4 * scale.prompt_tokens)):
        asks = [Ask(*prompts.text(tokens, "warm", count, index), scale.new_tokens) for index in range(count)]
        _read(endpoint, asks, await load.together(endpoint, asks))


def describe(name: str) -> str:
    match = _match(name)
    if match["mix"]:
        return "a mix of lengths, random arrivals"
    if match["copy"]:
        return "alone, repeating its prompt"
    if match["prose"]:
        return "alone, prose" + (f" at temperature {_DRAWN}" if match["drawn"] else "")
    if match["kept"]:
        return f"{match['kept']} at once, " + ("kept to a JSON list" if match["form"] == "list" else "drawn freely")
    if match["turns"]:
        return f"{match['turns']} at once, in turn, and liveness beside them"
    if match["batch"]:
        return f"{match['batch']} in turn, alone and beside a batch"
    if match["loop"]:
        return f"{match['loop']} always in flight, a mix of lengths"
    if match["late"]:
        arrives = f"{match['many']} prompts" if match["many"] else "a prompt"
        sizes = f"{int(match['late']):,}" + (f" to {int(match['longest']):,}" if match["longest"] else "")
        return f"{int(match['streams']) - 1} running, then {arrives} of {sizes} tokens"
    if match["prompt"]:
        return f"a prompt of {int(match['prompt']):,} tokens" + (", its beginning known" if match["again"] else "")
    return f"{match['streams']} at once" if match["streams"] != "1" else "alone"


def _match(name: str) -> re.Match[str]:
    match = _NAME.fullmatch(name)
    if match is None or (match["streams"] and not int(match["streams"])) or (match["late"] and match["streams"] == "1"):
        raise UnknownCase(f"no case {name!r}; cases are named like {', '.join(DEFAULT)}")
    return match


def _read(endpoint: Endpoint, asks: Sequence[Ask], recordings: Sequence[Recording]) -> list[Answer]:
    answers = [endpoint.read(recording) for recording in recordings]
    check_all(asks, answers)
    return answers


def _log_uniform(dice: random.Random, low: int, high: int) -> int:
    """Short ones are more common than long ones, as they are in life."""
    return round(math.exp(dice.uniform(math.log(low), math.log(high))))
