"""What an exception out of a handler means to its clients: TorchServe's status, and the reason.

Knows nothing of requests. Import it when ``ts`` can be imported.
"""

from __future__ import annotations

from ts.service import PredictionException

from mlserver_torch_stream.torchserve.worker.handler import described, text_of

FAILED = 503
OUT_OF_RESOURCES = 507


class WrongResults(Exception):
    """The handler returned something else than a list with one result for each request."""


def failure(error: BaseException) -> tuple[int, str]:
    if isinstance(error, WrongResults):
        return FAILED, str(error)
    if isinstance(error, PredictionException):
        code = error.error_code
        return (code if isinstance(code, int) and 400 <= code < 600 else FAILED), text_of(error.message)
    out = isinstance(error, MemoryError) or "CUDA" in text_of(error)
    return (OUT_OF_RESOURCES if out else FAILED), f"the handler raised {described(error)}"
