"""Finds the kind of an object by its key, matches globs, and makes the names of parts and the digest of a run.

Works only on keys and configurations, and never accesses a store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlserver_torch_stream.cloud.rows import Kind, RunRefused

MANIFEST = "manifest.json"
INPUTS = "inputs.jsonl"
_PART = re.compile(r"part-(\d{6,})\.jsonl")
_SUFFIXES = {
    Kind.JSONL: (".jsonl", ".ndjson"),
    Kind.CSV: (".csv",),
    Kind.TSV: (".tsv",),
    Kind.PARQUET: (".parquet",),
    Kind.IMAGE: (".png", ".jpg", ".jpeg", ".gif", ".webp"),
    Kind.AUDIO: (".wav", ".mp3", ".flac", ".ogg"),
    Kind.TEXT: (".txt", ".md", ".prompt"),
}

# Path of a value in a run's configuration -> the option that sets it.
_OPTIONS = {
    ("input",): "--input",
    ("glob",): "--glob",
    ("manifest",): "--manifest",
    ("kind",): "--as",
    ("part_rows",): "--part-rows",
    ("topic",): "--topic",
    ("chunk_bytes",): "--chunk-bytes",
    ("rows",): "--rows",
    ("sequences",): "--sequences",
    ("whole_bytes",): "--whole-bytes",
    ("limit",): "--limit",
    ("table", "columns"): "--column",
    ("table", "header"): "--header",
    ("table", "encoding"): "--encoding",
    ("table", "delimiter"): "--delimiter",
    ("table", "quote"): "--quote",
    ("table", "members"): "--members",
    ("model", "name"): "--model",
    ("model", "by"): "what answers (the engine here, or the API of --url)",
    ("model", "parameters"): "--parameters",
    ("model", "chat"): "--chat",
    ("model", "extra"): "--extra",
    ("model", "served"): "--served-model-name",
    ("model", "tensor"): "--tensor",
    ("model", "rows"): "--rows",
}
_COMPRESSED = "compressed"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_TARS = {".tar": None, ".tar.gz": "gzip", ".tgz": "gzip", ".tar.zst": "zstd", ".tzst": "zstd"}
# Formats of rows or objects that are not supported, with their endings.
_CLOSED = {
    "Parquet": (".parquet",),
    "ORC": (".orc",),
    "Avro": (".avro",),
    "Arrow": (".arrow", ".feather"),
    "a tar archive": (".tar", ".tgz", ".tzst", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"),
    "a zip archive": (".zip",),
    _COMPRESSED: (".gz", ".bz2", ".xz", ".zst"),
}


def part_name(number: int) -> str:
    """Returns the file name of a part; numbers begin at 0."""
    return f"part-{number:06d}.jsonl"


def part_number(name: str) -> int | None:
    """Returns the number of a part from its file name, or None if it is not the name of a part."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match and part_name(int(match[1])) == name else None


def errors_name(number: int) -> str:
    """Returns the name of the object that lists the failed rows of a part."""
    return f"errors-{number:06d}.jsonl"


def done_name(lane: int, lanes: int) -> str:
    """Returns the name of the object that marks a run, or worker ``lane`` of several ``lanes``, as finished."""
    return "done.json" if lanes == 1 else f"done-{lane}-of-{lanes}.json"


def kind_of(key: str, default: Kind | None) -> Kind:
    """Returns ``default`` if it is given, otherwise the kind that belongs to the key's ending. An unknown ending means
    bytes."""
    if default is not None:
        return default
    lower = key.lower()
    packed = next((end for end in _COMPRESSIONS if lower.endswith(end)), "")
    for kind, ends in _SUFFIXES.items():
        if lower.removesuffix(packed if kind.table else "").endswith(ends):
            return kind
    return Kind.BYTES


def closed_format(key: str, kind: Kind) -> str | None:
    """Returns the format for the key's ending if objects of this format cannot be read as ``kind``; otherwise None."""
    lower = key.lower()
    form = next((name for name, ends in _CLOSED.items() if lower.endswith(ends)), None)
    return None if kind is Kind.PARQUET or (form == _COMPRESSED and compression_of(key, kind)) else form


def compression_of(key: str, kind: Kind) -> str | None:
    """Returns the compression of an object that is decompressed while its rows or members are read; otherwise None."""
    lower = key.lower()
    if kind is Kind.ARCHIVE:
        return next((packed for end, packed in _TARS.items() if lower.endswith(end)), None)
    return next((packed for end, packed in _COMPRESSIONS.items() if kind.table and lower.endswith(end)), None)


def is_archive(key: str) -> bool:
    """True if the key's ending is that of an archive whose members can be read."""
    return key.lower().endswith((*_TARS, ".zip"))


def is_zip(key: str) -> bool:
    """Returns True if the key has the ending of a zip archive."""
    return key.lower().endswith(".zip")


def glob_pattern(glob: str) -> re.Pattern[str]:
    """Compiles a glob: ``*`` and ``?`` match within one level of a key, ``**`` across levels, ``[…]`` one character.

    Raises RunRefused if the glob is invalid.
    """
    pattern, rest = "", glob
    while rest:
        for token, meaning in (("**/", "(?:.*/)?"), ("**", ".*"), ("*", "[^/]*"), ("?", "[^/]")):
            if rest.startswith(token):
                pattern, rest = pattern + meaning, rest[len(token) :]
                break
        else:
            match = re.match(r"\[(!?)([^]]+)\]", rest)
            if match:
                inner = match[2].replace("\\", r"\\").replace("^", r"\^")
                pattern, rest = f"{pattern}[{'^' if match[1] else ''}{inner}]", rest[match.end() :]
            else:
                pattern, rest = pattern + re.escape(rest[0]), rest[1:]
    try:
        return re.compile(pattern, re.DOTALL)  # a name may hold a newline
    except re.error as error:
        raise RunRefused(f"--glob: {glob}: {error.msg}") from None


def lies_within(inner: str, outer: str) -> bool:
    """Returns True if objects written to the URL or folder ``inner`` would be read from ``outer``."""
    return f"{_place(inner)}/".startswith(f"{_place(outer)}/")


def _place(url: str) -> str:
    local = "://" not in url or url.startswith("file://")
    return (os.path.realpath(os.path.expanduser(url.removeprefix("file://"))) if local else url).rstrip("/")


def digest(value: Mapping[str, Any]) -> str:
    """Returns a SHA-256 digest of the values, which does not depend on the order of the keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns one clause for each value that differs, with the option that sets this value."""
    before, after = dict(_values(was)), dict(_values(now))
    paths = [*after, *(path for path in before if path not in after)]
    return [
        f"{_option(path)} {_in_words('was', before.get(path))} and {_in_words('is', after.get(path))} now"
        for path in paths
        if before.get(path) != after.get(path)
    ]


def _values(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the leaves of the configuration, each with the path of keys to the leaf."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, (*above, key))
        else:
            yield (*above, key), value


def _option(path: tuple[str, ...]) -> str:
    for length in (2, 1):
        if path[:length] in _OPTIONS:
            return " ".join([_OPTIONS[path[:length]], ".".join(path[length:])]).rstrip()
    return ".".join(path)


def _in_words(verb: str, value: Any) -> str:
    if value is None or value == []:
        return f"{verb} not given"
    return f"{verb} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
