"""Functions that tests run in the separate process of a load."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mlserver_torch_stream.errors import LoadFailed


class TwoParts(Exception):
    """An error that cannot be unpickled, as its constructor takes other arguments than ``args`` has."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def doubled(numbers: list[int]) -> list[int]:
    logger = logging.getLogger("mlserver_torch_stream.engine.loading")
    logger.debug("not asked for")
    logger.info("doubling %d numbers", len(numbers))
    logging.getLogger("mlserver_torch_stream").warning("100 %")
    print("a library's noise", flush=True)
    os.write(1, b"and that of C code")
    return [2 * number for number in numbers]


def fail() -> None:
    raise LoadFailed("the file lacks the weights x")


def fail_oddly() -> None:
    raise TwoParts("one", "two")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def check_with_wrong_kernels(*args: Any) -> Any:
    """``check_packed`` with a rotary table that is off by one position."""
    from mlserver_torch_stream.engine.checks import decoder_check
    from mlserver_torch_stream.engine.native.native_forward import NativeForward

    class Wrong(NativeForward):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._rotary.cos = self._rotary.cos.roll(1, 0)

    decoder_check.NativeForward = Wrong  # type: ignore[misc]
    return decoder_check.check_packed(*args)


def log_badly() -> str:
    logger = logging.getLogger("mlserver_torch_stream.engine.loading")
    logger.warning("bad %d args", "x")
    try:
        raise KeyError("the cause")
    except KeyError:
        logger.exception("it failed")
    return "done"


def look_up() -> None:
    raise KeyError("missing")


def send_no_message() -> None:
    os.write(int(sys.argv[1]), b"no pickle")
    time.sleep(600)


def ended_by_signals() -> str:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), each)
    return "none"
