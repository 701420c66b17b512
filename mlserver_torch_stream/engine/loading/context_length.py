"""Reads how many tokens a model's positions reach, and up to which length sequences can share a batch.

Knows nothing of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

# The context of models without a limit (recurrent ones, alibi): admission needs a number.
UNLIMITED_CONTEXT = 32768
_LIMITS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")


def max_model_len(model: Any, asked: int | None) -> int:
    """Returns the most tokens of a sequence, prompt included. ``asked`` is the setting."""
    own = _own_limit(model)
    if own is None:
        return asked or UNLIMITED_CONTEXT
    if asked is not None and asked > own:
        logger.warning("max_model_len %d is more than the model's %d positions: using %d", asked, own, own)
    steady = steady_positions(model)
    if asked is None and steady is not None and steady < own:
        logger.warning(
            "The model's positions are scaled anew beyond %d tokens: using %d of %d. With max_model_len set to more it "
            "runs one request at a time",
            *(steady, steady, own),
        )
        return steady
    return min(own, asked or own)


def comparable_context(model: Any) -> int:
    """Returns the most tokens that a sequence in a batch can reach, whatever the settings ask for."""
    limits = (_own_limit(model), steady_positions(model))
    return min((limit for limit in limits if limit is not None), default=UNLIMITED_CONTEXT)


def _own_limit(model: Any) -> int | None:
    """Returns None if there is no limit. XLNet's config expresses that by a length of -1."""
    config = model.config.get_text_config(decoder=True)
    given = (getattr(config, key, None) for key in _LIMITS)
    return next((limit for limit in given if isinstance(limit, int) and limit > 0), None)


def steady_positions(model: Any) -> int | None:
    """Returns the length up to which a position's embedding depends on the position alone; None: there is no end.

    Beyond it transformers scales the positions of all rows of a call by the longest one ("longrope"), but not those of
    the tokens that are in the cache already: in a batch, and with chunked prefill, that gives wrong tokens.
    """
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(each for each in given.values() if isinstance(each, Mapping))]  # of all layers, or by their type
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(limits, default=None)
