"""What batching gains: streams at once against the same streams in turn; and how responsive the server stays beside.

Knows our server only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks import load
from benchmarks.answers import Ask, check_all
from benchmarks.figures import span, spread
from benchmarks.prompts import Prompts
from benchmarks.servers import Live

_RATIO_GOAL = 0.25
_HEALTH_GOAL_MS = 100.0


async def measure(live: Live, prompts: Prompts, streams: int, tokens: int, health_tokens: int) -> dict[str, Any]:
    endpoint = live.endpoints["rest"]

    def asks(label: str, new_tokens: int) -> list[Ask]:
        return [Ask(*prompts.text(16, "gains", label, index), new_tokens) for index in range(streams)]

    warm, at_once, one_by_one, beside = (asks(each, tokens) for each in ("warm", "together", "in turn", "health"))
    await load.together(endpoint, warm)
    together = [endpoint.read(each) for each in await load.together(endpoint, at_once)]
    in_turn = [endpoint.read(each) for each in await load.in_turn(endpoint, one_by_one)]
    check_all(at_once, together)
    check_all(one_by_one, in_turn)
    running = asyncio.ensure_future(
        load.together(endpoint, [Ask(ask.prompt, ask.prompt_tokens, health_tokens) for ask in beside])
    )
    latencies = await load.probe_health(live.http_port, running)
    await running
    return {
        "streams": streams,
        "new_tokens": tokens,
        "together_s": span(together),
        "in_turn_s": span(in_turn),
        "ratio": span(together) / span(in_turn),
        "health_probes": len(latencies),
        **spread("health", latencies),
    }


def lines(gains: dict[str, Any]) -> list[str]:
    ratio, p99 = gains["ratio"], gains["health_p99_ms"]
    return [
        f"{gains['streams']} streams of {gains['new_tokens']} tokens: at once {gains['together_s']:.2f} s, in turn "
        f"{gains['in_turn_s']:.2f} s, ratio {ratio:.3f} ({_verdict(ratio < _RATIO_GOAL)}: goal < {_RATIO_GOAL})",
        f"GET /v2/health/live beside {gains['streams']} streams, {gains['health_probes']} probes: p50 "
        f"{gains['health_p50_ms']:.1f} ms, p99 {p99:.1f} ms, max {gains['health_max_ms']:.1f} ms "
        f"({_verdict(p99 <= _HEALTH_GOAL_MS)}: goal p99 <= {_HEALTH_GOAL_MS:.0f} ms)",
    ]


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
