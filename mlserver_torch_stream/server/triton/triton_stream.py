"""One ModelStreamInfer call in Triton's framing: every message is a separate request, and all run at the same time.

Knows nothing of how a message is answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from mlserver.grpc.servicers import InferenceServicer

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.server.grpc_refusals import refuse
from mlserver_torch_stream.server.rest.refusal import as_refusal
from mlserver_torch_stream.server.status import RefusedCall, as_server_error
from mlserver_torch_stream.server.streams.message_stream import MessageStream
from mlserver_torch_stream.server.triton.triton_reply import TritonReply

_ERRORS_END_IT = "triton_grpc_error"


async def triton_stream(
    inference: InferenceServicer, stalled_after: float, messages: AsyncIterator[bytes], context: grpc.ServicerContext
) -> AsyncIterator[bytes]:
    """The responses to all messages. At a shutdown the call ends with UNAVAILABLE.

    With the metadata ``triton_grpc_error: true`` the first error of a request ends the call, with the status of that
    error. ``stalled_after``: seconds in which the client must take a response (0: no bound).
    """
    errors_end_it = (_ERRORS_END_IT, "true") in {(key, value) for key, value in context.invocation_metadata()}

    def answer(message: bytes, index: int) -> TritonReply:
        return TritonReply(inference, context, message, index)

    responses = MessageStream(messages, answer, stalled_after, "A client of Triton's port")
    try:
        async for response in responses:
            if response.error and errors_end_it:
                raise RefusedCall(response.error, response.status)
            yield response.serialized()
    except RefusedCall as error:
        refuse(context, error)
    except RequestError as error:
        refuse(context, as_server_error(error, streaming=True))
    except Exception as error:
        refusal = as_refusal(error)
        refuse(context, RefusedCall(refusal.message, refusal.status))
    finally:
        responses.close()  # the client may have left
