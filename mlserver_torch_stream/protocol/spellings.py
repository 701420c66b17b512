"""The table of REST paths. The spellings of a path are tried in order.

A new spelling gets a row here; a runtime may have rows of its own in its attribute ``rest_routes``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlserver_torch_stream.protocol.anthropic_spelling import ANTHROPIC_SPELLINGS
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.seldon_spelling import SELDON
from mlserver_torch_stream.protocol.spelling import PromptSpelling, Spelling
from mlserver_torch_stream.protocol.tokenize_spelling import TOKENIZE_SPELLINGS
from mlserver_torch_stream.protocol.v2_reply import V2


@dataclass(frozen=True, slots=True)
class RestRoute:
    """A REST path and its spellings. The first spelling that accepts a body reads it; the last one accepts every body.

    If ``streaming`` is None, the body says whether the reply streams. On a path without ``{model_name}`` the body names
    the model.
    """

    path: str
    streaming: bool | None
    spellings: tuple[Spelling, ...]


_MODELS = ("/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}")
_ENDPOINTS: tuple[tuple[str, bool, tuple[Spelling, ...]], ...] = (
    ("infer", False, (SELDON, V2)),
    ("infer_stream", True, (SELDON, V2)),
    ("generate", False, (FLAT, SELDON, V2)),
    ("generate_stream", True, (FLAT, SELDON, V2)),
)
OPENAI_PREFIXES = ("/v1", "/openai/v1")  # OpenAI's prefix, and KServe's
REST_ROUTES = (
    *(
        RestRoute(f"{models}/{endpoint}", streaming, spellings)
        for models in _MODELS
        for endpoint, streaming, spellings in _ENDPOINTS
    ),
    *(
        RestRoute(
            f"{prefix}{path.removeprefix('/v1')}", False if isinstance(spelling, PromptSpelling) else None, (spelling,)
        )
        for prefix in OPENAI_PREFIXES
        for path, spelling in {**OPENAI_SPELLINGS, **ANTHROPIC_SPELLINGS}.items()
    ),
    *(RestRoute(path, False, (spelling,)) for path, spelling in TOKENIZE_SPELLINGS.items()),
)
