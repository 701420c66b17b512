"""Runs what a client can do against a server, one feature after the other, and prints how each of them ended.

Imports the standard library alone: it runs in the client's own environment, beside the script of that client.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

QUESTION = [{"role": "user", "content": "Grüße"}]
_Feature = Callable[[str], None]
_features: dict[str, _Feature] = {}


def feature(name: str) -> Callable[[_Feature], _Feature]:
    """Names a function that is given the server's URL and fails where the feature does not work."""

    def register(function: _Feature) -> _Feature:
        _features[name] = function
        return function

    return register


def main() -> None:
    """Prints a JSON object: for each feature null, or the traceback of its failure."""
    url, ended = sys.argv[1], {}
    for name, function in _features.items():
        try:
            function(url)
            ended[name] = None
        except Exception:
            ended[name] = traceback.format_exc()
    print(json.dumps(ended))
