"""A check for schemathesis: a reply with status 400 has OpenAI's error object, and its message names the bad field.

Runs inside schemathesis, in its own environment.
"""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.check
def bad_input_is_named(context: Any, response: Any, case: Any) -> None:
    if response.status_code == 400:
        error = response.json()["error"]
        if case.path.startswith("/v1/messages"):  # Anthropic's errors have no field for it
            assert error["message"] and error["type"] == "invalid_request_error"
            return
        assert error["param"] and error["message"].startswith(error["param"]), error
        assert error["type"] == "invalid_request_error"
