"""Small helpers that handlers import."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)
CLEANUP_REGEX = re.compile(r"<.*?>|&(?:[a-z0-9]+|#\d{1,6}|#x[\da-f]{1,6});")  # HTML tags and entities


class PredictionException(Exception):
    """Raised by a handler, to fail a request with a message and a status for the client."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def deprecated(
    version: object, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that ``version`` removes, so that each call warns."""

    def mark(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def warned(*args: Any, **kwargs: Any) -> Any:
            instead = f", use {replacement}" if replacement else ""
            warnings.warn(
                f"{func.__name__} is deprecated and will be removed in {version}{instead}", klass, stacklevel=2
            )
            return func(*args, **kwargs)

        return warned

    return mark


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Returns the classes that the module itself defines; only subclasses of ``parent_class`` if it is given."""
    own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    return [each for each in own if parent_class is None or issubclass(each, parent_class)]


def check_valid_pt2_backend(backend: str) -> bool:
    """Returns whether ``torch.compile`` has this backend, and logs a warning if not."""
    from torch._dynamo import list_backends

    known = backend in list_backends(exclude_tags=())
    if not known:
        logger.warning("torch.compile has no backend %r", backend)
    return known


def get_yaml_config(yaml_file_path: str) -> Any:
    """Returns the content of a YAML file."""
    import yaml

    with open(yaml_file_path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Returns the labels by class id, from a file such as ``index_to_name.json``; None if it does not exist."""
    if not os.path.isfile(mapping_file_path):
        logger.warning("%s is missing: answers will not name classes", mapping_file_path)
        return None
    with open(mapping_file_path, encoding="utf-8") as file:
        mapping = json.load(file)
    if not isinstance(mapping, dict):
        raise Exception(f"{mapping_file_path} must map class ids to labels")
    names = mapping.get("object_type_names")
    if isinstance(names, list):
        return {str(index): name for index, name in enumerate(names)}
    labels = {key: label[-1] if isinstance(label, list) else label for key, label in mapping.items()}
    if not all(isinstance(label, str) for label in labels.values()):
        raise Exception(f"{mapping_file_path}: a label must be a string or a list of strings")
    return labels


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Returns, for each row, its probabilities by label; without ``mapping`` the labels are the class ids.

    ``probs`` and ``lbl_classes`` hold, for each row, the probabilities and the class ids in the same order.
    """
    if not isinstance(probs, list):
        raise Exception("probabilities must be a list")
    if mapping is not None and not isinstance(mapping, dict):
        raise Exception("the mapping must be a dict")
    classes = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [
        {mapping[str(each)] if mapping is not None else str(each): prob for each, prob in zip(*row)}
        for row in zip(classes, probs)
    ]
