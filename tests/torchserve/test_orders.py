"""From MLServer's settings to what a worker loads: devices, the package or its stand-in, and BaseHandler with it."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlserver.settings import ModelParameters, ModelSettings

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.archive import open_archive
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.config.worker_settings import WorkerFiles
from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest, RequestPart
from mlserver_torch_stream.handlers.runtime.build import build, worker_order
from tests.torchserve.workshop import HELLO, run, running, write_handler


def _settings(**parameters: Any) -> ModelSettings:
    return ModelSettings(
        name="model",
        implementation="mlserver_torch_stream.TorchServeRuntime",
        parameters=ModelParameters(**parameters),
    )


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "parameters.uri"),
        ({"uri": "nowhere.mar"}, "no such archive"),
        (
            {"uri": "HANDLER", "extra": {"ts": "own"}},
            "extra: ts: Input should be 'auto', 'shim' or 'package'",
        ),
        *(
            (
                {"uri": "HANDLER", "extra": {"parallelType": kind, "torchrun": {"nproc-per-node": 2}, how: True}},
                "several ranks cannot be combined with continuousBatching or asyncCommunication",
            )
            for kind in ("pp", "tp", "pptp", "custom")
            for how in ("continuousBatching", "asyncCommunication")
        ),
        ({"uri": "HANDLER", "extra": {"batchSise": 2}}, "unknown key 'batchSise'; did you mean 'batchSize'"),
        ({"uri": "HANDLER", "extra": {"metric_config": "m"}}, "'metric_config'; did you mean 'metrics_config'"),
        (
            {"uri": "HANDLER", "extra": {"python": 3.8}},
            "extra: python: Input should be a valid string, got 3.8",
        ),
        ({"uri": "HANDLER", "extra": {"python": "none"}}, "parameters.extra.python: no such interpreter: none"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path: Path, parameters: dict[str, Any], said: str) -> None:
    uri = write_handler(tmp_path, HELLO)
    given = {key: uri if value == "HANDLER" else value for key, value in parameters.items()}
    with closing(asyncio.new_event_loop()) as loop, pytest.raises(SettingsError, match=said):
        build(_settings(**given), loop)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"deviceIds": [2, 3]}, [(2, None), (3, None), (2, None)]),
        ({"deviceIds": [2, 3], "deviceType": "cpu"}, [(None, None)] * 3),
        ({"deviceIds": [4, 5, 6, 7], "parallelType": "tp", "parallelLevel": 2}, [(0, "4,5"), (0, "6,7"), (0, "4,5")]),
        ({"deviceIds": [4, 5], "parallelType": "custom", "parallelLevel": 2}, [(0, "4,5")] * 3),
    ],
)
def test_workers_take_gpus_in_turn(tmp_path: Path, config: dict[str, Any], expected: list[Any]) -> None:
    archive = open_archive(write_handler(tmp_path, HELLO), None)
    orders = [worker_order("m", archive, read_config(config, {}), WorkerFiles(), number) for number in range(3)]
    seen = [(each.message["gpu"], each.environment[0].get("CUDA_VISIBLE_DEVICES")) for each in orders]
    assert seen == expected


def _base_handler_archive(folder: Path) -> str:
    """Writes a linear layer with known weights, served by BaseHandler itself behind the envelope ``body``."""
    import torch

    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 3.0]]))
        model.bias.zero_()
    state = {f"layer.{name}": value for name, value in model.state_dict().items()}
    torch.save(state, folder / "model.pth")
    (folder / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 1)\n\n    def forward(self, x):\n        return self.layer(x)\n"
    )
    (folder / "index_to_name.json").write_text('{"0": ["n1", "cat"]}')
    (folder / "mine.py").write_text(
        "from ts.torch_handler.base_handler import BaseHandler\n\nclass Mine(BaseHandler):\n"
        "    def postprocess(self, data):\n        assert self.initialized and self.mapping == {'0': 'cat'}\n"
        "        assert str(self.device) == self.map_location == 'cpu' and self.manifest is self.context.manifest\n"
        "        assert self.model_yaml_config == self.context.model_yaml_config\n"
        "        return super().postprocess(data)\n"
    )
    described = {"handler": "mine.py", "modelFile": "net.py", "serializedFile": "model.pth", "envelope": "body"}
    (folder / "MAR-INF").mkdir()
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps({"model": {"modelName": "net", **described}}))
    return str(folder)


@pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])
def test_a_base_handler_loads_an_eager_model_and_answers_a_batch(tmp_path: Path, which: str) -> None:
    async def scenario() -> None:
        async with running(_base_handler_archive(tmp_path), which, batchSize=2, maxBatchDelay=10_000) as pool:
            jobs = [
                pool.submit(
                    HandlerRequest(f"r{first}", [RequestPart("data", "application/json", f"[{first}, 1.0]".encode())])
                )
                for first in (1.0, 2.0)
            ]
            answers = [json.loads((await anext(job)).value) for job in jobs]
            assert answers == [[5.0], [7.0]]
            assert ("HandlerTime", "gauge") in {key[:2] for key in pool.metrics.own}

    run(scenario())
