"""The error of a model that the kernels cannot run."""

from __future__ import annotations


class UnsupportedLayout(Exception):
    """The model is no decoder of the Llama layout; the message names the difference in one line."""
