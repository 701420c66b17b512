"""The deprecated import path of ``send_intermediate_predict_response``."""

from __future__ import annotations

from typing import Any

from ts.handler_utils import utils
from ts.utils.util import deprecated


@deprecated(version="1.0", replacement="ts.handler_utils.utils.send_intermediate_predict_response")
def send_intermediate_predict_response(
    ret: Any, req_id_map: dict[int, str], message: str, code: int, context: Any
) -> None:
    """Sends one piece of each request's answer, as ``ts.handler_utils.utils`` does."""
    utils.send_intermediate_predict_response(ret, req_id_map, message, code, context)
