"""One ModelStreamInfer call in Triton's framing: every message is a request of its own, and all run at the same time.

Knows nothing of how a message is answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from mlserver.grpc.servicers import InferenceServicer
from mlserver.logging import logger

from mlserver_torch_stream.errors import NotServing, RequestError
from mlserver_torch_stream.server.grpc_refusals import refuse
from mlserver_torch_stream.server.lifecycle.inflight_requests import until
from mlserver_torch_stream.server.process_state import LIFECYCLE
from mlserver_torch_stream.server.rest.refusal import as_refusal
from mlserver_torch_stream.server.status import RefusedCall, as_server_error
from mlserver_torch_stream.server.streams.concurrent_replies import ConcurrentReplies
from mlserver_torch_stream.server.streams.read_timeout import ReadTimeout
from mlserver_torch_stream.server.triton.triton_reply import Framed, TritonReply

# Requests of one stream that run or wait in their model's queue at the same time; further ones are not read yet.
_MOST_OPEN = 256
_ERRORS_END_IT = "triton_grpc_error"


async def triton_stream(
    inference: InferenceServicer, stalled_after: float, messages: AsyncIterator[bytes], context: grpc.ServicerContext
) -> AsyncIterator[bytes]:
    """The responses to all messages. Ends when the client has closed its side and every request is answered.

    At a shutdown no further message is read, and the call ends with UNAVAILABLE: with OK a client would go on sending
    requests into a stream that has no reader. With the metadata ``triton_grpc_error: true`` the first error of a
    request ends the call, with the status of that error. ``stalled_after``: seconds in which the client must take a
    response (0: no bound).
    """
    requests = _Requests(messages)
    errors_end_it = (_ERRORS_END_IT, "true") in {(key, value) for key, value in context.invocation_metadata()}

    def answer(message: bytes, index: int) -> TritonReply:
        return TritonReply(inference, context, message, index)

    replies = ConcurrentReplies(requests.until_shutdown(), answer, _unchanged, _MOST_OPEN)

    def stalled() -> None:
        logger.warning(f"A client of Triton's port has read nothing for {stalled_after:g} s: its stream is cut")
        replies.close()

    responses = ReadTimeout(replies, stalled_after, stalled)
    try:
        async for response in responses:
            if response.error and errors_end_it:
                raise RefusedCall(response.error, response.status)
            yield response.serialized()
        if not requests.ended:
            raise NotServing(LIFECYCLE.shutdown_reason or "the server is shutting down")
    except RefusedCall as error:
        refuse(context, error)
    except RequestError as error:
        refuse(context, as_server_error(error, streaming=True))
    except Exception as error:
        refusal = as_refusal(error)
        refuse(context, RefusedCall(refusal.message, refusal.status))
    finally:
        # Synchronous: this may run in a task that cannot wait, when the client has left.
        responses.close()
        replies.close()


class _Requests:
    """The messages of one call. ``ended``: the client has closed its side."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages
        self.ended = False

    async def until_shutdown(self) -> AsyncIterator[bytes]:
        async for message in until(LIFECYCLE.refusing, self._all()):
            yield message

    async def _all(self) -> AsyncIterator[bytes]:
        async for message in self._messages:
            yield message
        self.ended = True


def _unchanged(framed: Framed) -> Framed:
    return framed
