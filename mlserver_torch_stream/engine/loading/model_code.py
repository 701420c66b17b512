"""Imports transformers' modeling code, and with it torch's compiler and sympy: 105 MB.

Loads of weights that our kernels alone compute with do without it.
"""

from __future__ import annotations

import transformers.modeling_utils  # noqa: F401
