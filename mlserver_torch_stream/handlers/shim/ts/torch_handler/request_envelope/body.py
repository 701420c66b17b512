"""The envelope that passes the plain bodies to the handler."""

from __future__ import annotations

from typing import Any

from ts.torch_handler.request_envelope.base import BaseEnvelope


class BodyEnvelope(BaseEnvelope):
    """TorchServe's envelope ``body``: the handler gets each row's ``data`` or ``body``."""

    def parse_input(self, data: Any) -> Any:
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        return data
