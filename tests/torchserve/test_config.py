"""model-config.yaml: what is honoured, what is refused, what is named."""

from __future__ import annotations

from typing import Any

import pytest

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.model_config import not_honoured, read_config


def test_values_of_the_yaml_and_overrides_over_them() -> None:
    config = read_config({"batchSize": 4, "maxBatchDelay": 10, "handler": {"x": 1}}, {"batchSize": 8})
    assert (config.batchSize, config.maxBatchDelay, config.minWorkers) == (8, 10, 1)
    strings = read_config({}, {"batchSize": "8", "continuousBatching": "true", "deviceType": "cpu"})
    assert (strings.batchSize, strings.continuousBatching, strings.deviceType) == (8, True, "cpu")


@pytest.mark.parametrize(
    ("yaml", "overrides", "said"),
    [
        ({"batchSize": "four"}, {}, "model-config.yaml: batchSize: .*got 'four'"),
        ({}, {"batchSize": 0}, "parameters.extra: batchSize: .*got 0"),
        ({}, {"batch_size": 1}, "unknown key 'batch_size'; did you mean 'batchSize'"),
        ({"parallelType": "xp"}, {}, "parallelType"),
        ({"torchrun": {"nnodes": 2}}, {}, "torchrun.nnodes"),
        ({"asyncCommunication": True, "continuousBatching": True}, {}, "asyncCommunication goes neither"),
        ({"parallelType": "tp", "parallelLevel": 2, "continuousBatching": True}, {}, "several ranks go neither"),
    ],
)
def test_what_is_wrong_is_named(yaml: dict[str, Any], overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_config(yaml, overrides)


@pytest.mark.parametrize(
    ("yaml", "ranks", "broadcasts"),
    [
        ({"parallelType": "pp", "torchrun": {"nproc-per-node": 4, "OMP_NUMBER_THREADS": 2}}, 4, False),
        ({"parallelType": "tp", "parallelLevel": 3}, 3, True),
        ({"parallelType": "pptp", "parallelLevel": 2}, 2, True),
        ({"parallelType": "custom", "torchrun": {"nproc-per-node": 2}}, 2, True),
        ({"parallelType": "custom", "parallelLevel": 4}, 1, True),
        ({"torchrun": {"nproc-per-node": 4}}, 1, True),
    ],
)
def test_ranks_and_who_gets_the_requests(yaml: dict[str, Any], ranks: int, broadcasts: bool) -> None:
    config = read_config(yaml, {})
    assert (config.ranks, config.broadcasts) == (ranks, broadcasts)


def test_what_is_not_honoured_is_named_and_what_is_the_handlers_is_not() -> None:
    yaml = {
        "minWorkers": 0,
        "maxRetryTimeoutInSec": 5,
        "torchrun": {"nproc-per-node": 1, "rdzv-backend": "c10d"},
        "batchsize": 2,
        "handler": {"model_path": "x"},
        "pippy": {"chunks": 1},
    }
    lines = list(not_honoured(yaml, read_config(yaml, {})))
    named = [line.partition(":")[0] for line in lines]
    assert named == ["maxRetryTimeoutInSec", "minWorkers", "torchrun.rdzv-backend", "batchsize"]
    assert "did you mean batchSize" in lines[-1]
