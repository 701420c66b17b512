"""How long a model waits for a store: the share of a run of ``cloud run`` in which its handler has nothing to infer.

``python -m benchmarks.cloud_idle`` reads 2,000 objects from an S3 server on this machine that answers each request
100 ms late. The handler sleeps for each object as long as a model on a GPU would take, in batches, and notes when each
call begins and ends. Its idle share is the part of the time between its first and its last call in which none runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

from benchmarks import machine

_HANDLER = """
import time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    began = time.monotonic()
    time.sleep({seconds} * len(data))
    with (Path(__file__).parent / "calls").open("a") as calls:
        calls.write(f"{{began}} {{time.monotonic()}} {{len(data)}}\\n")
    return [len(row["body"]) for row in data]
"""


class DelayingStore:
    """An S3 server with equal objects below ``s3://bucket``. Each request waits ``delay_s`` seconds for its answer."""

    def __init__(self, objects: int, size: int, delay_s: float) -> None:
        self._keys = [f"{number:06}.bin" for number in range(objects)]
        self._body = bytes(size)
        self._delay_s = delay_s
        self._in_flight = 0
        self.peak = 0  # requests in flight

    async def answer(self, request: web.Request) -> web.Response:
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._in_flight -= 1
        if "list-type" in request.query:
            return web.Response(text=self._listing(request.query), content_type="application/xml")
        headers = {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        return web.Response(body=self._body, headers=headers)

    def _listing(self, query: Any) -> str:
        """A page of 1,000 keys after ``start-after`` or the token, which is the last key of the page before."""
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = [key for key in self._keys if key > after]
        page, more = keys[:1000], len(keys) > 1000
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-10-21T07:28:00Z</LastModified>"
            f'<ETag>"1"</ETag><Size>{len(self._body)}</Size></Contents>'
            for key in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"


def idle_share(calls: list[tuple[float, float]]) -> float:
    """The part of the time between the first begin and the last end in which no call ran, from 0 to 1."""
    calls = sorted(calls)
    idle, end = 0.0, calls[0][0]
    for began, ended in calls:
        idle += max(0.0, began - end)
        end = max(end, ended)
    return idle / (end - calls[0][0])


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one run. Raises RuntimeError if it fails."""
    store = DelayingStore(arguments.objects, arguments.object_bytes, arguments.latency_ms / 1000)
    app = web.Application()
    app.router.add_get("/{path:.*}", store.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (folder / "handler.py").write_text(_HANDLER.format(seconds=arguments.model_ms / 1000))
    try:
        await _run(f"http://127.0.0.1:{runner.addresses[0][1]}", folder, arguments.batch_rows)
    finally:
        await runner.cleanup()
    lines = [line.split() for line in (folder / "calls").read_text().splitlines()]
    calls = [(float(began), float(ended)) for began, ended, _ in lines]
    objects = sum(int(count) for _, _, count in lines)
    if objects != arguments.objects:
        raise RuntimeError(f"the handler got {objects} of {arguments.objects} objects")
    seconds = max(ended for _, ended in calls) - min(began for began, _ in calls)
    return {
        **machine.describe(),
        **{name: vars(arguments)[name] for name in ("objects", "object_bytes", "latency_ms", "model_ms", "batch_rows")},
        "calls": len(calls),
        "seconds": round(seconds, 2),
        "in_turn_s": round(arguments.objects * (arguments.latency_ms + arguments.model_ms) / 1000, 2),
        "requests_in_flight": store.peak,
        "idle_share": round(idle_share(calls), 4),
    }


async def _run(url: str, folder: Path, batch_rows: int) -> None:
    options = ["--storage", f"endpoint={url}", "--storage", "skip_signature=true", "--storage", "region=x"]
    model = ["--handler", str(folder / "handler.py"), "--batch-rows", str(batch_rows), "--extra", '{"ts": "shim"}']
    where = ["--input", "s3://bucket", "--output", str(folder / "out"), *options]
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud", "run", *where, *model]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the run ended with status {process.returncode}: {said.decode()}")


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if the idle share is above ``--at-most``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cloud_idle", description=__doc__)
    parser.add_argument("--objects", type=int, default=2_000)
    parser.add_argument("--object-bytes", type=int, default=10_000)
    parser.add_argument("--latency-ms", type=float, default=100.0, help="of each request to the store")
    parser.add_argument("--model-ms", type=float, default=25.0, help="that the model takes for each object")
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--at-most", type=float, default=0.05, help="the largest idle share")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(arguments, Path(folder)))
    print(json.dumps(figures))
    if (warning := machine.warning(figures)) is not None:
        print(warning, file=sys.stderr)
    return int(figures["idle_share"] > arguments.at_most)


if __name__ == "__main__":
    sys.exit(main())
