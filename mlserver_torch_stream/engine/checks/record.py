"""Records the results of the checks at load in the cache folder, so that a later start need not repeat the checks.

A record has the decoder's plan, the model's config as plain values, and the findings of the checks; or, if our kernels
do not reproduce the model's logits, the sentence that says so. A record is valid only for the same files, settings,
code and chip. Records are stored like compiled kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult
from mlserver_torch_stream.engine.config_fields import comparable_context, plain_config, steady_positions
from mlserver_torch_stream.engine.failures import Unsuitable
from mlserver_torch_stream.engine.fingerprint import checksum, file_stamps, length_setting, shaping_settings
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.kept_files import foreign, keep, keep_newest, kept_files, replaceable
from mlserver_torch_stream.engine.loading.loader import LoadedWeights
from mlserver_torch_stream.engine.loading.placement import DeviceShare
from mlserver_torch_stream.engine.native.compile_kernels import cpu_properties
from mlserver_torch_stream.engine.native.decoder_plan import DecoderPlan, build_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions, open_kernels
from mlserver_torch_stream.engine.native.structure import Decoder
from mlserver_torch_stream.settings import ResolvedSettings
from mlserver_torch_stream.version import __version__

logger = logging.getLogger(__name__)

MAX_RECORDS = 64  # the maximum number in one cache folder; a record takes 50 kB, or 1 MB for a 7B model with its norms
_FOLDER = "records"
_SUFFIX = ".record"
_ENGINE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Replaces transformers' model if our kernels run the whole forward: then only the model's plain config is read."""

    config: PreTrainedConfig


class Anew(Enum):
    """The reason why a load has to be checked."""

    NEW = "no earlier load of it is recorded"
    WEIGHTS = "its files have changed"
    CODE = "the software has changed"
    CHIP = "it runs on another chip"
    DAMAGED = "its record is damaged"
    FOREIGN = "other users can write its record"


class NotRecordable(Unsuitable):
    """Raised if the results of a load's checks cannot be recorded; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Digests of everything that the checks' results depend on.

    ``place`` is the digest of the model's location and of the settings that determine its weights.
    """

    place: str
    weights: str
    code: str
    chip: str

    @property
    def stem(self) -> str:
        return f"{self.place}-{self.weights}-{self.code}-{self.chip}"


@dataclass(frozen=True, slots=True)
class ProvedLoad:
    """The results of a load's checks.

    ``dtype`` is the dtype of dense weights in memory; None means quantised blocks.
    """

    plan: DecoderPlan
    weights: LoadedWeights  # its model is a ``ModelOutline``
    findings: SelfCheckResult
    placement: tuple[DeviceShare, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class RefusedKernels:
    """The result of a load whose model our kernels cannot run: ``reason`` says in one line how the logits differ."""

    reason: str


def record_key(resolved: ResolvedSettings, folder: Path, files: Iterable[Path], kernels: KernelOptions) -> RecordKey:
    """Returns the key of a load of ``folder`` with the weight files ``files``.

    Raises NoKernels or LoadFailed as ``open_kernels`` does, and OSError if a file cannot be read.
    """
    library, variant = open_kernels(kernels.cache_dir, checksum)
    source = resolved.source
    # A layer of an image may give all files one time, and an edit of a config may keep its size.
    contents = [(file.name, checksum(file)) for file in (*files, *sorted(folder.glob("*config.json")))]
    stamps = [file_stamps(resolved), file_stamps(resolved, folder), contents]
    versions = [module.__version__ for module in (torch, transformers, safetensors, tokenizers)]
    return RecordKey(
        place=_digest(source.kind, source.location, shaping_settings(resolved), length_setting(resolved, str(folder))),
        weights=_digest(stamps),
        code=_digest(__version__, _code(), library, variant, versions, platform.python_version()),
        chip=_digest(cpu_properties(), torch.backends.cpu.get_cpu_capability(), torch.cuda.is_available()),
    )


def read_record(key: RecordKey, cache_dir: Path) -> ProvedLoad | RefusedKernels | Anew:
    """Returns the results of an earlier load's checks, or the reason why this load has to be checked."""
    folder = cache_dir / _FOLDER
    found = sorted(folder.glob(f"{key.stem}-*{_SUFFIX}"))
    for path in kept_files(folder, f"{key.stem}-*{_SUFFIX}", _digest_of_all):
        try:
            proved = _decode(key, path)
        except Exception as error:  # a file that was written by another version, or not by this package
            logger.warning("%s is not used: %s: %s", path, type(error).__name__, error)
            continue
        with suppress(OSError):  # a read-only folder
            os.utime(path)
        return proved
    return _reason(key, folder, found)


def write_record(key: RecordKey, result: ProvedLoad | RefusedKernels, cache_dir: Path) -> None:
    """Stores the results of a load's checks. If they cannot be stored, the log gets one line."""
    folder = cache_dir / _FOLDER
    try:
        own = result.plan.own if isinstance(result, ProvedLoad) else {}
        content = save(own, {"record": json.dumps({"key": key.stem, **_plain_result(result)})})
        folder.mkdir(parents=True, exist_ok=True)
        if (why := replaceable(folder)) is not None:  # no load would use the record
            logger.warning("The checks of this load are not recorded in %s: %s", folder, why)
            return
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as place:
            made = Path(place, f"record{_SUFFIX}")
            made.write_bytes(content)
            keep(made, folder, key.stem, _digest_of_all)
        keep_newest(folder, f"*{_SUFFIX}", MAX_RECORDS)
    except NotRecordable as error:
        logger.info("The checks of this load are not recorded: %s", error)
    except OSError as error:
        logger.info("The checks of this load are not recorded: %s cannot be written: %s", folder, error.strerror)


def outline_of(model: Any) -> ModelOutline:
    """Returns the model's plain config. Raises NotRecordable if this config would change the cache or the context."""
    outline = ModelOutline(plain_config(_plain(vars(model.config))))
    if any(part(outline) != part(model) for part in (_cache_groups, comparable_context, steady_positions)):
        raise NotRecordable(f"its cache or its context needs the config class {type(model.config).__name__}")
    return outline


def recorded_decoder(proved: ProvedLoad, tensor: Mapping[str, Tensor]) -> Decoder:
    """Builds the decoder from tensors of memory-mapped files, so a weight is in memory only after its first use.

    Raises NotRecordable if the record and the files do not match.
    """
    try:
        decoder = build_decoder(
            proved.plan.structure, proved.plan.own, lambda name: _vector_as(tensor[name], proved.dtype)
        )
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise NotRecordable(f"the record does not match its files: {error}") from error
    decoder = replace(decoder, dense_dtype=proved.dtype)
    if isinstance(decoder.embedding, Tensor) and decoder.embedding is not decoder.head.weights[0]:
        # The kernels read it for as long as they live.
        return replace(decoder, embedding=decoder.embedding.to(decoder.dtype, copy=True))
    return decoder


def mapped_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Maps safetensors files, and returns their tensors by name."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


# Checkpoints have a tensor for each matrix of each expert; transformers stacks these tensors in one parameter for a
# layer. By the end of the parameter's name: under which modules families keep their experts, and the matrices' names.
_EXPERTS = {
    "mlp.experts.gate_up_proj": (
        ("mlp.experts", ("gate_proj", "up_proj")),
        ("block_sparse_moe.experts", ("w1", "w3")),
    ),
    "mlp.experts.down_proj": (("mlp.experts", ("down_proj",)), ("block_sparse_moe.experts", ("w2",))),
}


def stored_parameters(model: Any, files: Iterable[Path]) -> dict[str, Tensor]:
    """Returns the parameters of transformers' model by their names in its files.

    transformers joins the experts of a layer, of which files have single tensors. A parameter for whose parts the files
    have no names keeps its own name.
    """
    stored: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            stored.update(opened.keys())
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        names = next((names for names in _stored_names(name, len(parameter)) if stored.issuperset(names)), [name])
        joined = parameter.flatten(0, 1) if parameter.ndim > 2 else parameter
        found |= zip(names, joined.chunk(len(names)) if len(names) > 1 else [parameter], strict=True)
    return found


def _stored_names(name: str, experts: int) -> Iterator[list[str]]:
    """Yields the names under which files may have a parameter, or its parts for each of so many experts."""
    yield [name]
    yield [name.replace(".mlp.gate.", ".block_sparse_moe.gate.")]
    for end, spellings in _EXPERTS.items():
        if name.endswith(end):
            for place, parts in spellings:
                stem = name.removesuffix(end) + place
                yield [f"{stem}.{expert}.{part}.weight" for expert in range(experts) for part in parts]


def check_files_hold(plan: DecoderPlan, parameters: Mapping[str, Tensor], files: Iterable[Path]) -> None:
    """Raises NotRecordable unless the files contain a bit-identical copy of each weight that the plan names."""
    stored = mapped_tensors(files)
    for name in sorted(plan.used):
        parameter = parameters[name]
        if name not in stored or not torch.equal(stored[name].to(parameter.dtype), parameter):
            raise NotRecordable(f"the files do not contain {name} with the values that the model has")


def _vector_as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Converts a vector. Matrices stay mapped and are converted one at a time, while they are packed."""
    return tensor if dtype is None or tensor.ndim > 1 else tensor.to(dtype)


def _reason(key: RecordKey, folder: Path, found: Sequence[Path]) -> Anew:
    if found:
        return Anew.FOREIGN if any(path.exists() and foreign(path) for path in found) else Anew.DAMAGED
    parts = {"weights": Anew.WEIGHTS, "code": Anew.CODE, "chip": Anew.CHIP}
    others = []
    for path in folder.glob(f"{key.place}-*{_SUFFIX}"):
        kept = dict(zip(parts, path.stem.split("-")[1:4], strict=False))
        others.append([reason for part, reason in parts.items() if kept.get(part) != getattr(key, part)])
    return min(filter(None, others), key=len, default=[Anew.NEW])[0]


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=8).hexdigest()


def _digest_of_all(record: Path) -> str:
    """Returns a digest of all bytes: the samples of ``checksum`` would miss damage to a record of more than 1 MiB."""
    return hashlib.blake2b(record.read_bytes(), digest_size=8).hexdigest()


@cache
def _code() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(_ENGINE.rglob("*.py")):
        digest.update(f"{source.relative_to(_ENGINE)}\0".encode() + source.read_bytes())
    return digest.hexdigest()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns only the values that JSON can store unchanged."""
    plain = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            if json.loads(json.dumps(value)) == value:
                plain[name] = value
    return plain


def _cache_groups(model: Any) -> object:
    layout = CacheLayout(model.config)
    return layout.spec(1), layout.has_states


def _plain_result(result: ProvedLoad | RefusedKernels) -> dict[str, Any]:
    """Returns the result as values that JSON can store. Raises NotRecordable if that would change them."""
    if isinstance(result, RefusedKernels):
        return {"refused": result.reason}
    findings, weights = result.findings, result.weights
    generation = weights.generation_config.to_dict()
    try:
        copied = GenerationConfig.from_dict(json.loads(json.dumps(generation))).to_dict()
    except (TypeError, ValueError):
        copied = None
    if copied != generation:
        raise NotRecordable("its generation config cannot be written as JSON")
    return {
        "structure": result.plan.structure,
        "config": _plain(vars(weights.model.config)),
        "generation": generation,
        "vocab_size": weights.vocab_size,
        "description": weights.description,
        "chunked": findings.chunked,
        "way": findings.way.value,
        "page_size": findings.page_size,
        "specs": {str(device): asdict(spec) for device, spec in findings.specs.items()},
        "placement": [asdict(share) for share in result.placement],
        "dtype": None if result.dtype is None else str(result.dtype).removeprefix("torch."),
    }


def _decode(key: RecordKey, path: Path) -> ProvedLoad | RefusedKernels:
    """Reads a record. Raises ValueError if the record has been renamed, that is, if it belongs to another load."""
    with safe_open(path, "pt") as file:
        values = json.loads(file.metadata()["record"])
        own = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if values["key"] != key.stem:
        raise ValueError("it is the record of another load")
    if "refused" in values:
        return RefusedKernels(values["refused"])
    specs = {torch.device(device): _spec(spec) for device, spec in values["specs"].items()}
    return ProvedLoad(
        DecoderPlan(values["structure"], own),
        LoadedWeights(
            ModelOutline(plain_config(values["config"])),
            GenerationConfig.from_dict(values["generation"]),
            values["vocab_size"],
            values["description"],
        ),
        SelfCheckResult(None, values["chunked"], Way(values["way"]), values["page_size"], specs),
        tuple(_share(share) for share in values["placement"]),
        None if values["dtype"] is None else getattr(torch, values["dtype"]),
    )


def _spec(fields: Mapping[str, Any]) -> CacheSpec:
    groups = (LayerGroup(**{**group, "layers": tuple(group["layers"])}) for group in fields["groups"])
    return CacheSpec(**{**fields, "groups": tuple(groups)})


def _share(fields: Mapping[str, Any]) -> DeviceShare:
    return DeviceShare(**{**fields, "layers": tuple(fields["layers"]), "rest": tuple(fields["rest"])})
