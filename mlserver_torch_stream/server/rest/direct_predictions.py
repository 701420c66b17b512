"""Answers short predictions of handlers without the app, whose layers take longer than the rest of such a request.

A request is begun here once its body is complete. If the handler's whole answer then arrives as one piece with status
200, it is sent from here. In every other case the request is passed on to the app, which reads the reply where it
stands: if the request is refused, fails, streams or is answered with another status, or if the client disconnects.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Scope

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.server.host import ReceivedRequest, ServerHost, counting_layer, find_model
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.request import EnteredModel, HandlerModel, PieceReply
from mlserver_torch_stream.server.rest.connection import NotesTransport, as_length
from mlserver_torch_stream.server.rest.endpoints import COUNTED, CountedRequest
from mlserver_torch_stream.server.rest.prediction_messages import (
    first_headers,
    handler_headers,
    is_multipart,
    reply_headers,
    request_id_of,
    simple_fields,
)

BEGUN = "mlserver_torch_stream.begun"  # in a scope: the ``BegunPrediction`` that the app continues
_PATH = "/predictions/"
_LABELS = ("/predictions/{model_name}", "/predictions/{model_name}/{model_version}")  # of metrics
_MAX_BYTES = 64 * 1024  # uvicorn reads a larger body only as fast as the app does
_OF_OTHERS = {b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"}  # headers of requests for the app


@dataclass(frozen=True, slots=True)
class BegunPrediction:
    """A prediction that has begun, and the model that it has entered."""

    request_id: str
    model: HandlerModel
    version: str | None
    entered: EnteredModel
    reply: PieceReply


class DirectPredictions:
    """Answers requests to ``/predictions``, if no layer of the app changes a request or its answer."""

    def __init__(self, host: ServerHost, options: ServerOptions) -> None:
        self._host = host
        self._max_bytes = min(_MAX_BYTES, options.max_body_bytes)
        self._app: ASGIApp | None = None
        self._counting: object | None = None

    def wants(self, app: ASGIApp, scope: Scope) -> bool:
        """Whether ``answer`` may answer a request whose head has arrived, in place of ``app``. If so, the request
        counts from now on.
        """
        if scope["method"] != "POST" or not scope["path"].startswith(_PATH) or scope["http_version"] != "1.1":
            return False
        if app is not self._app:
            self._app, self._counting = app, counting_layer(app, NotesTransport)
        headers = dict(scope["headers"])
        length = as_length(headers.get(b"content-length", b"").decode("latin-1"))
        if length is None or length > self._max_bytes or not _OF_OTHERS.isdisjoint(headers):
            return False
        if self._counting is None or scope["root_path"]:
            return False
        _, version, model = self._named(scope)
        if model is None:
            return False
        scope[COUNTED] = CountedRequest(self._counting, scope["method"], _LABELS[version is not None])
        return True

    def _named(self, scope: Scope) -> tuple[str, str | None, HandlerModel | None]:
        """Returns the model that the path names, and its name and version in the path; None if it has no handler."""
        name, *rest = scope["path"][len(_PATH) :].split("/")
        version = rest[0] if rest else None
        model = None if len(rest) > 1 or version == "" else find_model(self._host.registry, name, version)
        return name, version, model if isinstance(model, HandlerModel) else None

    def answer(self, request: ReceivedRequest) -> None:
        """Answers the request, or passes it on to the app, now or later."""
        begun = self._begin(request)
        if begun is None:
            request.pass_on()
            return
        answer = _Answer(request, begun)
        try:
            begun.entered.run(begun.reply.begin)
        except Exception:
            answer.pass_on()
        else:
            begun.reply.when_arrived(answer.arrived)

    def _begin(self, request: ReceivedRequest) -> BegunPrediction | None:
        """Enters the model that the path names; returns None if the app is to find out what to answer."""
        name, version, model = self._named(request.scope)
        headers = first_headers(request.scope)
        content_type, request_id = headers.get("content-type", ""), request_id_of(headers)
        if model is None or is_multipart(content_type):
            return None
        try:
            fields = simple_fields(request.body, content_type)
            reply = model.open_prediction(fields, handler_headers(headers), request_id, EndpointKind.REST_STREAM)
        except Exception:  # which the app reports
            return None
        entered = EnteredModel(self._host.data_plane, name, version, model)
        entered.begin()
        return BegunPrediction(request_id, model, version, entered, reply)


class _Answer:
    """The answer to one request."""

    def __init__(self, request: ReceivedRequest, begun: BegunPrediction) -> None:
        self._request = request
        self._begun = begun
        self._over = False
        request.protocol.watchers.add(self.pass_on)

    def arrived(self) -> None:
        """Called when the first piece of the answer has arrived, or when the answer has ended otherwise."""
        request, begun = self._request, self._begun
        piece = None if self._over else begun.reply.arrived_whole()
        if piece is None or piece.status != 200 or not request.client_reads:
            self.pass_on()
            return
        try:
            headers = reply_headers(begun.request_id, piece.content_type, piece.headers)
        except RequestError:
            self.pass_on()
            return
        self._end()
        request.answer(200, [(b"content-length", b"%d" % len(piece.value)), *headers], piece.value)
        begun.entered.run(begun.reply.answered)
        begun.entered.end()
        request.scope[COUNTED].end(200)

    def pass_on(self) -> None:
        """Lets the app continue the request. Idempotent."""
        if not self._over:
            self._end()
            self._request.scope[BEGUN] = self._begun
            self._request.pass_on()

    def _end(self) -> None:
        self._over = True
        self._request.protocol.watchers.discard(self.pass_on)
