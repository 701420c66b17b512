"""``PredictionException``, and ``Service``, with which tests of handlers call an entry point as torchserve does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ts
from ts.context import Context, RequestProcessor
from ts.protocol.otf_message_handler import create_predict_response
from ts.utils.util import PredictionException as PredictionException
from ts.utils.util import get_yaml_config

PREDICTION_METRIC = "PredictionTime"
logger = logging.getLogger(__name__)


class Service:
    """The entry point of one model with its context. The server's own workers do not use it."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        entry_point: Callable[[Any, Any], Any],
        gpu: int | None,
        batch_size: int,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> None:
        config = ((manifest or {}).get("model") or {}).get("configFile")
        yaml = get_yaml_config(os.path.join(model_dir, config)) if config else {}
        self._context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size,
            gpu,
            ts.__version__,
            limit_max_image_pixels,
            metrics_cache,
            yaml,
        )
        self._entry_point = entry_point
        self.cl_socket: Any = None

    @property
    def context(self) -> Context:
        return self._context

    def set_cl_socket(self, cl_socket: Any) -> None:
        self.cl_socket = cl_socket

    @staticmethod
    def retrieve_data_for_inference(
        batch: Sequence[dict[str, Any]] | None,
    ) -> tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]:
        """The headers, the handler's data and the ids of a batch as ``retrieve_msg`` reads it."""
        if batch is None:
            raise ValueError("Received invalid inputs")
        headers = []
        for request in batch:
            found: dict[str, Any] = {
                part["name"]: {"content-type": part["contentType"]} for part in request["parameters"]
            }
            for header in request.get("headers") or ():
                found[header["name"].decode()] = header["value"].decode()
            headers.append(RequestProcessor(found))
        data = [{part["name"]: part["value"] for part in request["parameters"]} for request in batch]
        return headers, data, {place: request["requestId"].decode() for place, request in enumerate(batch)}

    def predict(self, batch: Sequence[dict[str, Any]]) -> bytearray | None:
        """The message that torchserve would send: the results, or the failure of the whole batch."""
        from mlserver_torch_stream.handlers.worker.calls import FAILED, add_prediction_time, failure, mismatch

        context = self._context
        context.request_processor, data, ids = self.retrieve_data_for_inference(batch)
        context.request_ids = context.metrics.request_ids = ids
        context.cl_socket = self.cl_socket
        began = time.monotonic()
        try:
            returned = self._entry_point(data, context)
        except Exception as error:
            logger.error("The handler failed", exc_info=error)
            status, message = failure(error)
            return create_predict_response(None, ids, message, status)
        trouble = mismatch(returned, len(data))
        if trouble is not None:
            return create_predict_response(None, ids, trouble, FAILED)
        add_prediction_time(context, began)
        return create_predict_response(returned, ids, "Prediction success", 200, context=context)


def emit_metrics(metrics: Iterable[Any] | None) -> None:
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)
