"""Draws docs/stream.svg: a chat in a terminal, with each token at the time at which a real server sent it.

python docs/record.py --url http://127.0.0.1:8080 --model smollm2
"""

from __future__ import annotations

import argparse
import time
from html import escape
from pathlib import Path

from mlserver_torch_stream import client

QUESTION = "Write a short poem about the sea."
COLUMNS = 78
CHARACTER, LINE, LEFT, TOP = 8.43, 20, 16, 30  # pixels of a monospace font at 14px
TYPING_S = 1.2  # before the answer begins

STYLE = """text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#d4d4d4}
.you{fill:#8bc34a}.t{opacity:0;animation:show .01s linear forwards}@keyframes show{to{opacity:1}}
@media (prefers-reduced-motion:reduce){.t{animation-delay:0s!important}}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("stream.svg"))
    arguments = parser.parse_args()
    pieces = record(arguments.url, arguments.model)
    arguments.output.write_text(draw(pieces), encoding="utf-8")


def record(url: str, model: str) -> list[tuple[float, str]]:
    """Returns the pieces of the text, each with the seconds from the request to its arrival."""
    began = time.monotonic()
    messages = [{"role": "user", "content": QUESTION}]
    deltas = client.stream(url, model, messages=messages, max_tokens=120, temperature=0, stop=["\n\n"])
    return [(time.monotonic() - began, delta.text) for delta in deltas if delta.text]


def draw(pieces: list[tuple[float, str]]) -> str:
    rows = [
        f'<text x="{LEFT}" y="{TOP}">$ make chat</text>',
        f'<text x="{LEFT}" y="{TOP + LINE}"><tspan class="you">you&gt; </tspan>{escape(QUESTION)}</text>',
    ]
    row, column = 2, 0
    for seconds, piece in pieces:
        for number, line in enumerate(piece.split("\n")):
            if number or column + len(line) > COLUMNS:
                row, column = row + 1, 0
                line = line.lstrip(" ")
            if word := line.strip(" "):
                x, y = LEFT + (column + len(line) - len(line.lstrip(" "))) * CHARACTER, TOP + row * LINE
                shape = f'x="{x:.1f}" y="{y}" textLength="{len(word) * CHARACTER:.1f}"'
                rows.append(
                    f'<text class="t" {shape} style="animation-delay:{TYPING_S + seconds:.2f}s">{escape(word)}</text>'
                )
            column += len(line)
    width, height = round(2 * LEFT + COLUMNS * CHARACTER), TOP + (row + 1) * LINE
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            "<title>An answer that appears token by token in a terminal</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1e1e1e"/>',
            *rows,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
