"""Reads the token of the management API, and checks that a request has it.

Knows nothing of what a request asks.
"""

from __future__ import annotations

import hmac
import re
from pathlib import Path

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.torchserve.management_refusal import ManagementRefusal

_BEARER = re.compile(r"Bearer\s+(\S+)")


def read_token(options: ServerOptions) -> str | None:
    """None if no request needs a token. Raises SettingsError if there is no token and tokens are not switched off."""
    if options.disable_token_authorization:
        return None
    token = options.management_token
    if options.management_token_file:
        try:
            token = Path(options.management_token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{PREFIX}MANAGEMENT_TOKEN_FILE: cannot be read: {error}") from None
    if not token:
        raise SettingsError(
            f"the management API needs {PREFIX}MANAGEMENT_TOKEN or {PREFIX}MANAGEMENT_TOKEN_FILE, "
            f"or {PREFIX}DISABLE_TOKEN_AUTHORIZATION=true"
        )
    return token


def check_token(expected: str | None, authorization: str | None) -> None:
    """``authorization``: the request's header. Raises ManagementRefusal."""
    if expected is None:
        return
    match = _BEARER.fullmatch(authorization or "")
    if match is None or not hmac.compare_digest(match[1].encode(), expected.encode()):
        message = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
        raise ManagementRefusal(400, "InvalidKeyException", message)
