"""The process that ``text_process`` starts: it renders chat templates and tokenizes texts, one job after another.

Each job and each reply is a line of JSON; both go over stdin, which is a socket. The process ends when its parent ends,
which closes the socket, or when a job takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Job = Callable[..., Any]
_STATM = Path("/proc/self/statm")
_IMPORTS_BYTES = 2**29  # the maximum address space that the imports take


def main(max_bytes: int, max_seconds: float) -> None:
    """Runs jobs until the parent ends.

    ``max_bytes`` limits the memory in addition to that of the imports; ``max_seconds`` is the time limit of each job.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent gets them too; this process ends with it
        signal.signal(number, signal.SIG_IGN)
    jobs: dict[str, Job] = {}
    with open(0, "wb", closefd=False) as replies:
        for line in sys.stdin.buffer:
            name, arguments = json.loads(line)
            if name == "start":
                jobs = _jobs(**arguments)
                _limit_memory(max_bytes)
                reply: Mapping[str, Any] = {"result": None}
            else:
                signal.setitimer(signal.ITIMER_REAL, max_seconds + 1)  # the parent may have ended meanwhile
                reply = _run(jobs[name], arguments)
                signal.setitimer(signal.ITIMER_REAL, 0)
            # In UTF-8, because the server takes several times as long to read escapes. Lone surrogates are refused
            # there.
            replies.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            replies.flush()


def _jobs(tokenizer: str | None) -> dict[str, Job]:
    """Imports the modules that the jobs need, and returns the jobs by name."""
    if tokenizer is None:
        from transformers.utils.chat_template_utils import render_jinja_template

        return {"render": lambda **arguments: str(render_jinja_template(**arguments)[0][0])}
    from tokenizers import Tokenizer

    known = Tokenizer.from_str(tokenizer)
    known.no_padding()
    known.no_truncation()

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return list(known.encode(text, add_special_tokens=add_special_tokens).ids)

    return {"encode": encode}


def _limit_memory(max_bytes: int) -> None:
    """Limits the memory of this process. A lower limit that the process has inherited from the server remains."""
    if sys.platform != "linux":
        return
    try:
        bytes_now = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc is mounted
        bytes_now = _IMPORTS_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = bytes_now + max_bytes if hard == resource.RLIM_INFINITY else min(bytes_now + max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _run(job: Job, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {"result": job(**arguments)}
    except MemoryError:
        return {"exceeded": "needed more memory than its process may have"}
    except RecursionError:
        return {"exceeded": f"nested more than {sys.getrecursionlimit()} calls"}
    except BaseException as error:  # a panic of the library is not an Exception
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
