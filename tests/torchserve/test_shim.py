"""Parts of the stand-in for ``ts`` that handlers import: its metrics, its utilities."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shim")


@pytest.fixture
def metrics(shim: None, tmp_path: Path) -> Any:
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    (tmp_path / "metrics.yaml").write_text("model_metrics: {}")
    return MetricsCacheYamlImpl(str(tmp_path / "metrics.yaml"))


def test_a_deprecated_function_warns_at_each_call() -> None:
    from ts.utils.util import deprecated

    @deprecated(version="2.0", replacement="after")
    def before() -> int:
        return 1

    with pytest.warns(
        PendingDeprecationWarning, match="before is deprecated and will be removed in 2.0, use after"
    ) as noted:
        assert before() + before() == 2
    assert len(noted) == 2


def test_an_error_metric_keeps_the_level_that_it_is_given(metrics: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ts.metrics.dimension import Dimension

    caplog.set_level(logging.INFO)
    metrics.add_error("Failed", 2, dimensions=[Dimension("Level", "mine")])
    metrics.get_metric("Failed").add_or_update(3, ["yours"], "r-1")
    assert "[METRICS]Failed.unit:2|#Level:mine|#type:COUNTER|#hostname:" in caplog.text
    assert "[METRICS]Failed.unit:3|#Level:yours|" in caplog.text and caplog.text.endswith(",r-1\n")


def test_what_handlers_of_the_examples_import_of_utils() -> None:
    from ts.utils.util import CLEANUP_REGEX, check_valid_pt2_backend

    assert CLEANUP_REGEX.sub("", "a<br/> b&amp;&#65;") == "a b"
    assert check_valid_pt2_backend("inductor") and not check_valid_pt2_backend("nowhere")
