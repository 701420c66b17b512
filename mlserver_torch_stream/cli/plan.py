"""``mlserver-torch-stream plan MODEL --device NAME``: prints how many streams fit on a device, and how fast they can
be.

The command reads the model's config; it loads no weights and does not need the device. ``engine.planning`` does the
arithmetic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlserver_torch_stream.cli.argument_types import above_zero, nbytes, positive
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.model_source import resolve_source

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.capacity import CapacityPlan, DeviceSpec, ModelSize

_CONTEXT = 4096
_DEVICES = 8
_HOST = "cpu"


def main(argv: Sequence[str]) -> int:
    """Prints how many sequences fit into the memory of the devices, and returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        device = _device(arguments)
        source = resolve_source(arguments.model)
        from mlserver_torch_stream.engine.capacity import plan_model, read_size

        device_type = "cpu" if arguments.device == _HOST else "cuda"
        size = read_size(source, arguments.dtype, arguments.revision, device_type)
    except (SettingsError, LoadFailed) as error:
        print(f"error: {str(error).removeprefix('parameters.uri: ')}", file=sys.stderr)
        return 2
    context = min(arguments.context, size.max_model_len)
    plans = plan_model(size, device, context, arguments.devices, on_host=arguments.device == _HOST)
    print("\n".join([*_head(source.name, size, device, context), "", *_table(plans), "", *_advice(plans, size)]))
    return 0 if any(plan.fits for plan in plans) else 1


def _device(arguments: argparse.Namespace) -> DeviceSpec:
    from mlserver_torch_stream.engine.capacity import DeviceSpec, find_device
    from mlserver_torch_stream.engine.machine import read_host

    if arguments.device not in (None, _HOST):
        device = find_device(arguments.device)
        for name in ("memory", "bandwidth", "tflops"):
            if getattr(arguments, name) is not None:
                raise SettingsError(f"--{name}: is known for --device {arguments.device}; leave one of the two out")
        return device
    name, memory = "a device", arguments.memory
    if arguments.device == _HOST:
        name, memory = "this machine's CPU", memory or read_host().available_bytes
    if memory is None or arguments.bandwidth is None:
        raise SettingsError(f"give --device, or --memory and --bandwidth; --device {_HOST} needs --bandwidth too")
    flops = None if arguments.tflops is None else arguments.tflops * 1e12
    return DeviceSpec(name, memory, arguments.bandwidth * 1e9, flops, "as given")


def _head(name: str, size: ModelSize, device: DeviceSpec, context: int) -> list[str]:
    flops = "" if device.flops is None else f", {device.flops / 1e12:,.4g} TFLOP/s in bf16"
    experts = f", {size.active / 1e9:.2f} of them active for a token" if size.experts else ""
    last = size.spec.sequence_bytes(context + size.spec.page_size) - size.spec.sequence_bytes(context)
    return [
        f"{name} ({size.kind}): {size.parameters / 1e9:.2f} billion parameters{experts}; {size.dtype}: "
        f"{_gb(size.weight_bytes)} GB",
        f"KV cache: {last // size.spec.page_size:,} bytes for a token after the {context:,}th of a stream, "
        f"{size.spec.sequence_bytes(context) / 1e6:,.1f} MB for a stream of {context:,}, in pages of "
        f"{size.spec.page_size} tokens",
        f"{device.name}: {_gb(device.memory)} GB, {device.bandwidth / 1e9:,.0f} GB/s{flops} ({device.source})",
    ]


def _table(plans: Sequence[CapacityPlan]) -> list[str]:
    rows = [
        [
            "devices",
            "weights, GB each",
            "cache, GB each",
            "streams",
            "tokens/s alone",
            "all together",
            "prompt tokens/s",
        ],
        *(
            [
                str(plan.ranks),
                _gb(plan.weights),
                _gb(plan.cache),
                f"{plan.streams:,}",
                *([f"< {plan.alone:,.0f}", f"< {plan.together:,.0f}"] if plan.fits else ["-", "-"]),
                f"< {plan.prompts:,.0f}" if plan.fits and plan.prompts is not None else "-",
            ]
            for plan in plans
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _advice(plans: Sequence[CapacityPlan], size: ModelSize) -> list[str]:
    least = next((plan.ranks for plan in plans if plan.fits), None)
    limits = (
        "Speeds are limits: memory read once per step, or arithmetic, whichever is slower. Streams are what the cache "
        "has room for;\nset max_num_seqs to that number (its default is 256 on GPUs and 32 elsewhere)."
    )
    if least is None:
        most = plans[-1].ranks
        why = f"{size.kind} can be split by {', '.join(map(str, size.ranks))}"
        return [
            f"Does not fit on {most} of these: {why}. A device_map with more GPUs, the CPU or a disk holds any model."
        ]
    if least == 1 and len(plans) == 1:
        return ["Fits.", limits]
    if least == 1:
        return [
            "Fits on one: set replicas to the number of GPUs, or scale pods. Tensor parallel makes one stream faster.",
            limits,
        ]
    return [f"Set tensor_parallel_size: {least}, and scale pods of {least} GPUs.", limits]


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream plan",
        description="Compute how many streams of a model fit on a device, and how fast they can be. Loads no weights.",
    )
    parser.add_argument("model", help="a folder, a .gguf file, a hub id or embedded://…")
    parser.add_argument("--device", help="a known device, such as h100 or cpu; a wrong name prints the list")
    parser.add_argument("--memory", type=nbytes, help="memory of a device that is not known, such as 48GB")
    parser.add_argument("--bandwidth", type=above_zero, help="memory bandwidth of a device that is not known, in GB/s")
    parser.add_argument(
        "--tflops", type=above_zero, help="dense bf16 TFLOP/s of a device that is not known (default: not a limit)"
    )
    parser.add_argument(
        "--devices",
        type=positive,
        default=_DEVICES,
        help="the maximum number of devices to plan for (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=positive,
        default=_CONTEXT,
        help="tokens of a stream, prompt and answer together (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="type of the weights (default: the checkpoint's)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    return parser
