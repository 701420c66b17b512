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
CLEANUP_REGEX = re.compile(r"<.*?>|&(?:[a-z0-9]+|#\d{1,6}|#x[\da-f]{1,6});")  # HTML's tags and entities


class PredictionException(Exception):
    """A failure with a status and a text for the client."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def deprecated(
    version: object, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function that ``version`` removes: each call warns."""

    def mark(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def warned(*args: Any, **kwargs: Any) -> Any:
            instead = f", use {replacement}" if replacement else ""
            warnings.warn(f"{func.__name__} is deprecated and goes with {version}{instead}", klass, stacklevel=2)
            return func(*args, **kwargs)

        return warned

    return mark


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that are defined in a module itself."""
    own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    return [each for each in own if parent_class is None or issubclass(each, parent_class)]


def check_valid_pt2_backend(backend: str) -> bool:
    """True if ``torch.compile`` has this backend; logs a backend that it does not have."""
    from torch._dynamo import list_backends

    known = backend in list_backends(exclude_tags=())
    if not known:
        logger.warning("torch.compile has no backend %r", backend)
    return known


def get_yaml_config(yaml_file_path: str) -> Any:
    """Returns what a YAML file holds."""
    import yaml

    with open(yaml_file_path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """The labels by class id, from ``index_to_name.json``; None if there is no such file."""
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
        raise Exception(f"{mapping_file_path}: a label must be a string or a list of them")
    return labels


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """For each row, probabilities by label; without a mapping the class id is the label."""
    if not isinstance(probs, list):
        raise Exception("probabilities must be a list")
    if mapping is not None and not isinstance(mapping, dict):
        raise Exception("the mapping must be a dict")
    classes = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [
        {mapping[str(each)] if mapping is not None else str(each): prob for each, prob in zip(*row)}
        for row in zip(classes, probs)
    ]
