"""The cases by name, as README.md lists them: which requests each one sends, and which figures it returns."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx

from benchmarks import load
from benchmarks.answers import Answer, Ask
from benchmarks.endpoints import BadAnswer, HttpEndpoint
from benchmarks.figures import Figures, disturbance, span, spread, summarize
from benchmarks.load import Endpoint
from benchmarks.process import Usage
from benchmarks.prompts import Prompts

DEFAULT = (
    *("c1", "c4", "c16", "c32", "c128", "p128", "p512", "p2000"),
    *("p2000-again", "c32+p2000", "c2+32p16", "mix", "loop16"),
)
ALONE = "c1"
_DRAWN = 0.8  # the temperature of answers that are not greedy
_LIST = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 100}  # longer than an answer
_BATCH_STARTS_S = 120.0
_BUSY = ("validating", "in_progress")
_WRK = 'wrk.method="POST"\nwrk.body=string.rep("x", {})\nwrk.headers["Content-Type"]="application/octet-stream"\n'
_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


@dataclass(frozen=True)
class Scale:
    """How much is asked; ``--quick`` asks less."""

    prompt_tokens: int = 128
    new_tokens: int = 128
    wave_streams: int = 8  # a case runs waves until so many streams have run, but at least one wave
    late_new_tokens: int = 16  # of the prompts that arrive late
    running_new_tokens: int = 256  # of the streams that run when these prompts arrive
    outlasting_new_tokens: int = 48  # of these streams for each late prompt, if the prompts have several lengths
    mix_requests: int = 48
    mix_per_s: float = 2.0
    mix_prompts: tuple[int, int] = (32, 1500)
    mix_answers: tuple[int, int] = (16, 400)
    batch_rows: int = 1000
    loop_requests: int = 64
    loop_prompts: tuple[int, int] = (32, 2000)
    loop_answers: tuple[int, int] = (16, 512)
    wrk_s: int = 10


QUICK = Scale(
    new_tokens=8, wave_streams=2, late_new_tokens=2, running_new_tokens=48, outlasting_new_tokens=16,
    mix_requests=6, mix_per_s=4.0, mix_prompts=(32, 200), mix_answers=(4, 16), batch_rows=60,
    loop_requests=6, loop_prompts=(32, 200), loop_answers=(4, 16), wrk_s=1,
)  # fmt: skip


class BatchTooShort(Exception):
    """Raised if a batch does not run as long as the requests beside it."""


@dataclass(frozen=True)
class _Run:
    """One run of a case against an endpoint. ``numbers`` are those of the case's name, ``sweep`` names the run.

    ``answers`` gets the answers of cases that run in waves.
    """

    name: str
    numbers: Mapping[str, int]
    scale: Scale
    prompts: Prompts
    endpoint: Endpoint
    pid: int
    sweep: object
    answers: list[Answer] = field(default_factory=list)

    async def at_once(self) -> Figures:
        streams = self.numbers["streams"]
        waves = range(max(1, self.scale.wave_streams // streams))
        return await self._waves([[self._ask(None, wave, index) for index in range(streams)] for wave in waves])

    async def prompt(self) -> Figures:
        return await self._waves([[self._ask(self.numbers["tokens"])]])

    async def again(self) -> Figures:
        """Sends two prompts, one after the other, that differ only in their last tokens."""
        text, _ = self.prompts.text(self.numbers["tokens"], self.name, self.sweep)
        first, second = (self._whole(f"{text} {end}") for end in ("And then it rained.", "The next day was dry."))
        await self._together([first])
        return await self._waves([[second]])

    async def late(self) -> Figures:
        """Sends prompts while streams run."""
        scale, many = self.scale, self.numbers.get("many", 1)
        sizes, running = [self.numbers["tokens"]] * many, scale.running_new_tokens
        if longest := self.numbers.get("longest"):
            dice = random.Random(13)  # the same lengths in every sweep and for every server
            sizes = [_log_uniform(dice, self.numbers["tokens"], longest) for _ in range(many)]
            running = max(running, many * scale.outlasting_new_tokens)
        asks = [self._ask(None, index, new=running) for index in range(self.numbers["running"])]
        late = [self._ask(tokens, "late", index, new=scale.late_new_tokens) for index, tokens in enumerate(sizes)]
        async with Usage(self.pid) as usage:
            recordings, intruders = await load.intrusion(self.endpoint, asks, late)
        answers, late_answers = (load.read(self.endpoint, *each) for each in ((asks, recordings), (late, intruders)))
        return {**disturbance(answers, late_answers), **usage.figures}

    async def mix(self) -> Figures:
        scale = self.scale
        dice = random.Random(7)  # the same lengths and arrivals in every sweep and for every server
        asks, offsets, now = [], [], 0.0
        for index in range(scale.mix_requests):
            new_tokens = _log_uniform(dice, *scale.mix_answers)
            asks.append(self._ask(_log_uniform(dice, *scale.mix_prompts), index, new=new_tokens))
            offsets.append(now)
            now += dice.expovariate(scale.mix_per_s)
        async with Usage(self.pid) as usage:
            recordings = await load.at_times(self.endpoint, asks, offsets)
        return {**summarize([load.read(self.endpoint, asks, recordings)]), **usage.figures}

    async def loop(self) -> Figures:
        scale = self.scale
        dice = random.Random(11)  # the same lengths in every sweep and for every server
        sizes = [
            (_log_uniform(dice, *scale.loop_prompts), _log_uniform(dice, *scale.loop_answers))
            for _ in range(scale.loop_requests)
        ]
        asks = [self._ask(tokens, index, new=new) for index, (tokens, new) in enumerate(sizes)]
        async with Usage(self.pid) as usage:
            recordings = await load.always(self.endpoint, asks, self.numbers["streams"])
        return {**summarize([load.read(self.endpoint, asks, recordings)]), **usage.figures}

    async def copy(self) -> Figures:
        texts = [self._ask(None, wave).prompt for wave in range(self.scale.wave_streams)]
        return await self._waves([[self._whole(f"{text}\n\n{text}\n\n")] for text in texts])

    async def prose(self, temperature: float = 0.0) -> Figures:
        scale, waves = self.scale, range(self.scale.wave_streams)
        texts = [self.prompts.passage(scale.prompt_tokens, self.sweep, wave) for wave in waves]
        return await self._waves([[Ask(*text, scale.new_tokens, temperature)] for text in texts])

    async def prose_drawn(self) -> Figures:
        return await self.prose(_DRAWN)

    async def free(self, schema: Mapping[str, object] | None = None) -> Figures:
        asks = [self._ask(None, index) for index in range(self.numbers["streams"])]
        return await self._waves([[replace(ask, temperature=_DRAWN, schema=schema) for ask in asks]])

    async def listed(self) -> Figures:
        return await self.free(_LIST)

    async def turns(self) -> Figures:
        streams, tokens = self.numbers["streams"], self.scale.new_tokens // 2

        def asks(label: str, new: int = tokens) -> list[Ask]:
            return [self._ask(16, label, index, new=new) for index in range(streams)]

        await load.together(self.endpoint, asks("warm"))
        at_once = await self._together(asks("together"))
        one_by_one = await self._in_turn(asks("in turn"))
        running = asyncio.ensure_future(load.together(self.endpoint, asks("live", new=3 * tokens)))
        latencies = await load.probe_health(self.endpoint.port, running)
        await running
        seconds = {"together_s": span(at_once), "in_turn_s": span(one_by_one)}
        ratio = seconds["together_s"] / seconds["in_turn_s"]
        return {"streams": streams, "new_tokens": tokens, **seconds, "ratio": ratio, **spread("health", latencies)}

    async def beside_batch(self) -> Figures:
        """Raises BatchTooShort if the batch does not begin in time, or ends before the requests do."""
        scale, requests, new = self.scale, self.numbers["requests"], min(16, self.scale.new_tokens)

        async def first_tokens(label: str) -> list[float]:
            answers = await self._in_turn([self._ask(None, label, index, new=new) for index in range(requests)])
            return [answer.ttft for answer in answers]

        alone = await first_tokens("alone")
        with httpx.Client(base_url=f"http://127.0.0.1:{self.endpoint.port}/v1", timeout=60) as client:
            batch = _create_batch(client, [self._ask(None, "batch", row).prompt for row in range(scale.batch_rows)],
                                  scale.new_tokens // 2)  # fmt: skip
            end = time.monotonic() + _BATCH_STARTS_S
            while (found := client.get(batch).json())["request_counts"]["completed"] < 2:
                if time.monotonic() > end or found["status"] not in _BUSY:
                    raise BatchTooShort(f"the batch is {found['status']}, and fewer than two of its rows are completed")
                await asyncio.sleep(0.05)
            beside = await first_tokens("beside")
            found = client.get(batch).json()
            client.post(f"{batch}/cancel")
        if found["status"] not in _BUSY:
            raise BatchTooShort(f"the batch of {scale.batch_rows} rows ended before the {requests} requests did")
        times = {**spread("alone", alone), **spread("beside", beside)}
        ratio = times["beside_p50_ms"] / times["alone_p50_ms"]
        return {**times, "ratio": ratio, "rows": found["request_counts"]["completed"]}

    async def _waves(self, waves: Sequence[Sequence[Ask]]) -> Figures:
        async with Usage(self.pid) as usage:
            recorded = [await load.together(self.endpoint, asks) for asks in waves]
        answers = [load.read(self.endpoint, *wave) for wave in zip(waves, recorded, strict=True)]
        self.answers.extend(answer for wave in answers for answer in wave)
        return {**summarize(answers), **usage.figures}

    async def requests(self) -> Figures:
        """Has wrk send bodies of one size, first for some seconds that are not measured. Raises BadAnswer."""
        assert isinstance(self.endpoint, HttpEndpoint)
        url = f"http://127.0.0.1:{self.endpoint.port}{self.endpoint.spelling.path}"
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
            script.write(_WRK.format(self.numbers["bytes"]))
            script.flush()
            wrk = ["wrk", "-t1", "-c64", "--latency", "-s", script.name, url]
            await _told(*wrk, "-d3s")
            async with Usage(self.pid) as usage:
                said = await _told(*wrk, f"-d{self.scale.wrk_s}s")
        if "Non-2xx" in said or "Socket errors" in said:
            raise BadAnswer(said)
        rate = float(re.findall(r"Requests/sec:\s*([\d.]+)", said)[0])
        tails = re.findall(r"(50|99)%\s+([\d.]+)(\w+)", said)
        times = {f"p{share}_ms": float(at) * _MS[unit] for share, at, unit in tails}
        cpu_s = usage.figures["cpu_s"] / (rate * self.scale.wrk_s) * 1000
        return {"requests_per_s": rate, **times, **usage.figures, "cpu_s_per_1000": cpu_s}

    async def _together(self, asks: Sequence[Ask]) -> list[Answer]:
        return load.read(self.endpoint, asks, await load.together(self.endpoint, asks))

    async def _in_turn(self, asks: Sequence[Ask]) -> list[Answer]:
        return load.read(self.endpoint, asks, await load.in_turn(self.endpoint, asks))

    def _ask(self, tokens: int | None, *label: object, new: int | None = None) -> Ask:
        """Returns a request; lengths that are not given are those of the scale."""
        text = self.prompts.text(tokens or self.scale.prompt_tokens, self.name, self.sweep, *label)
        return Ask(*text, new or self.scale.new_tokens)

    def _whole(self, text: str) -> Ask:
        return Ask(text, self.prompts.count(text), self.scale.new_tokens)


@dataclass(frozen=True)
class _Kind:
    """Cases whose names match ``pattern``. The description may have the numbers of the name."""

    pattern: str
    description: str
    run: Callable[[_Run], Awaitable[Figures]]


_LATE = r"c(?P<streams>\d+)\+(?P<many>\d+)p(?P<tokens>\d+)"
_KINDS = (
    _Kind(r"c(?P<streams>1)", "alone", _Run.at_once),
    _Kind(r"c(?P<streams>\d+)", "{streams} at once", _Run.at_once),
    _Kind(r"p(?P<tokens>\d+)", "a prompt of {tokens:,} tokens", _Run.prompt),
    _Kind(r"p(?P<tokens>\d+)-again", "a prompt of {tokens:,} tokens, its beginning known", _Run.again),
    _Kind(r"c(?P<streams>\d+)\+p(?P<tokens>\d+)", "{running} running, then a prompt of {tokens:,} tokens", _Run.late),
    _Kind(_LATE, "{running} running, then {many} prompts of {tokens:,} tokens", _Run.late),
    _Kind(
        _LATE + r"-(?P<longest>\d+)",
        "{running} running, then {many} prompts of {tokens:,} to {longest:,} tokens",
        _Run.late,
    ),
    _Kind("mix", "a mix of lengths, random arrivals", _Run.mix),
    _Kind(r"loop(?P<streams>\d+)", "{streams} always in flight, a mix of lengths", _Run.loop),
    _Kind("copy", "alone, repeating its prompt", _Run.copy),
    _Kind("prose", "alone, prose", _Run.prose),
    _Kind("prose-drawn", f"alone, prose at temperature {_DRAWN}", _Run.prose_drawn),
    _Kind(r"c(?P<streams>\d+)-list", "{streams} at once, constrained to a JSON list", _Run.listed),
    _Kind(r"c(?P<streams>\d+)-free", "{streams} at once, unconstrained", _Run.free),
    _Kind(r"turns(?P<streams>\d+)", "{streams} at once, in turn, and liveness beside them", _Run.turns),
    _Kind(r"batch(?P<requests>\d+)", "{requests} in turn, alone and beside a batch", _Run.beside_batch),
    _Kind(r"r(?P<bytes>\d+)", "64 requests in flight, bodies of {bytes:,} B", _Run.requests),
)


class UnknownCase(ValueError):
    """Raised for a name that does not belong to a case."""


class Case:
    """One case, which can be run any number of times; each ``sweep`` has its own prompts.

    Raises UnknownCase if there is no case with the name.
    """

    def __init__(self, name: str, scale: Scale, prompts: Prompts) -> None:
        self.name = name
        self.answers: list[Answer] = []  # of the latest run, if the case runs in waves
        self._scale, self._prompts = scale, prompts
        self._kind, self._numbers = _kind_of(name)

    @property
    def streams(self) -> int:
        """The largest number of streams that run at once; 0 if the case streams nothing."""
        return 0 if "bytes" in self._numbers else max(self._numbers.get(name, 1) for name in ("streams", "many"))

    async def run(self, endpoint: Endpoint, pid: int, sweep: object) -> Figures:
        """Runs the case; no other ``sweep`` has the same prompts. Raises WrongCount, BadAnswer or BatchTooShort."""
        run = _Run(self.name, self._numbers, self._scale, self._prompts, endpoint, pid, sweep)
        self.answers = run.answers
        return await self._kind.run(run)


def make_cases(names: Sequence[str], scale: Scale, prompts: Prompts) -> list[Case]:
    """Returns the cases with these names. Raises UnknownCase if there is no case with a name."""
    return [Case(name, scale, prompts) for name in names]


async def warm_up(endpoint: Endpoint, scale: Scale, prompts: Prompts, streams: int) -> None:
    """Sends one request, a batch and a long prompt, so that nothing is done for the first time while it is measured.

    The batch has the lengths of the cases, so that a server whose KV cache grows with use has already grown it.
    """
    for count, tokens in ((1, scale.prompt_tokens), (streams, scale.prompt_tokens), (1, 4 * scale.prompt_tokens)):
        asks = [Ask(*prompts.text(tokens, "warm", count, index), scale.new_tokens) for index in range(count)]
        load.read(endpoint, asks, await load.together(endpoint, asks))


def describe(name: str) -> str:
    """Returns a description of the case. Raises UnknownCase if there is no case with the name."""
    kind, numbers = _kind_of(name)
    return kind.description.format(**numbers)


def _kind_of(name: str) -> tuple[_Kind, dict[str, int]]:
    for kind in _KINDS:
        if match := re.fullmatch(kind.pattern, name):
            numbers = {group: int(value) for group, value in match.groupdict().items()}
            numbers["running"] = numbers.get("streams", 1) - 1
            if numbers["running"] >= (1 if kind.run is _Run.late else 0):
                return kind, numbers
    raise UnknownCase(f"there is no case {name!r}; cases have names like {', '.join(DEFAULT)}")


def _create_batch(client: httpx.Client, prompts: Sequence[str], new_tokens: int) -> str:
    """Returns the batch's path."""
    model = client.get("/models").json()["data"][0]["id"]
    body = {"model": model, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    row = {"method": "POST", "url": "/v1/completions"}
    rows = [
        json.dumps({**row, "custom_id": str(n), "body": {**body, "prompt": each}}) for n, each in enumerate(prompts)
    ]
    file = client.post("/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", "\n".join(rows).encode())})
    asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return f"/batches/{client.post('/batches', json=asked).raise_for_status().json()['id']}"


async def _told(*command: str) -> str:
    """Runs a program and returns what it prints. Raises BadAnswer if it fails."""
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    if done.returncode:
        raise BadAnswer(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _log_uniform(dice: random.Random, low: int, high: int) -> int:
    """Returns a random length; short ones are more common than long ones, as in real traffic."""
    return round(math.exp(dice.uniform(math.log(low), math.log(high))))
