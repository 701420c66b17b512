"""A decorator that measures a handler's method if its YAML has ``handler: {profile: true}``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


def timed(func: Callable[..., Any]) -> Callable[..., Any]:
    """Records the duration of each call as the metric ``ts_handler_<method>``, in milliseconds."""

    @functools.wraps(func)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self.context, "model_yaml_config", None) or {}
        if not (config.get("handler") or {}).get("profile"):
            return func(self, *args, **kwargs)
        began = time.perf_counter()
        result = func(self, *args, **kwargs)
        _wait_for_device()
        self.context.metrics.add_time(f"ts_handler_{func.__name__}", (time.perf_counter() - began) * 1000)
        return result

    return measured


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
