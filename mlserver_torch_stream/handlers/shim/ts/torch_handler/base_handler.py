"""The base class of most handlers: it loads a TorchScript file, or a model file with its state, and calls the model."""

from __future__ import annotations

import abc
import importlib
import logging
import os
import time
from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.utils.util import list_classes_from_module, load_label_mapping

logger = logging.getLogger(__name__)
PROFILER_AVAILABLE = False  # only the torchserve package writes the traces of ENABLE_TORCH_PROFILER


class BaseHandler(abc.ABC):  # noqa: B024
    """A handler whose ``handle`` calls preprocess, inference and postprocess, which a subclass may override."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.model_yaml_config: dict[str, Any] = {}

    def initialize(self, context: Any) -> None:
        """Loads the archive's model. Raises RuntimeError if the archive has no model that can be loaded."""
        self.model_yaml_config = context.model_yaml_config or {}
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            logger.warning("ENABLE_TORCH_PROFILER is not implemented here: install torchserve")
        properties = context.system_properties
        gpu = properties.get("gpu_id")
        on_gpu = gpu is not None and torch.cuda.is_available()
        self.map_location = "cuda" if on_gpu else "cpu"
        self.device = torch.device(f"cuda:{gpu}" if on_gpu else "cpu")
        self.manifest = context.manifest
        folder = properties["model_dir"]
        described = self.manifest["model"]
        if "serializedFile" in described:
            self.model_pt_path = os.path.join(folder, described["serializedFile"])
        self.model = self._load(folder, described.get("modelFile"))
        self.mapping = load_label_mapping(os.path.join(folder, "index_to_name.json"))
        self.initialized = True

    def _load(self, folder: str, model_file: str | None) -> Any:
        if model_file:
            model = self._load_pickled_model(folder, model_file, self.model_pt_path)
            model.to(self.device)
        elif (self.model_pt_path or "").endswith(".pt"):
            model = self._load_torchscript_model(self.model_pt_path)
        else:
            raise RuntimeError(
                "No model weights could be loaded: the manifest names neither a modelFile nor a .pt file"
            )
        model.eval()
        return self._compiled(model)

    def _compiled(self, model: Any) -> Any:
        """Compiles the model if the YAML has ``pt2``: the name of a backend, or ``compile: {enable: true, …}``."""
        asked = self.model_yaml_config.get("pt2")
        if asked is None:
            return model
        options: dict[str, Any] = {"backend": asked} if isinstance(asked, str) else dict(asked)
        if "compile" in options:
            options = dict(options["compile"])
            if not options.pop("enable", False):
                return model
        elif "export" in options:
            raise RuntimeError("pt2.export is not implemented here: install torchserve")
        return torch.compile(model, **options)

    def _load_torchscript_model(self, model_pt_path: str | None) -> Any:
        return torch.jit.load(model_pt_path, map_location=self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        if not os.path.isfile(os.path.join(model_dir, model_file)):
            raise RuntimeError(f"The archive has no file {model_file}")
        classes = list_classes_from_module(importlib.import_module(model_file.split(".")[0]))
        if len(classes) != 1:
            raise ValueError(
                f"{model_file} must define exactly one class, it has {[each.__name__ for each in classes]}"
            )
        model = classes[0]()
        if model_pt_path:
            model.load_state_dict(torch.load(model_pt_path, map_location=self.device))
        return model

    @timed
    def preprocess(self, data: Any) -> Any:
        """Turns the requests' data into the model's input."""
        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model without gradients."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Turns the model's output into a list with one result for each request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """Answers a batch: preprocess, inference, postprocess."""
        began = time.perf_counter()
        self.context = context
        if self._is("describe"):
            output = [self.describe_handle()]
        elif self._is("explain"):
            self.explain = True
            output = self.explain_handle(self.preprocess(data), data)
        else:
            output = self.postprocess(self.inference(self.preprocess(data)))
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return output

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Answers a request for explanations with the handler's ``get_insights``."""
        row = raw_data[0]
        inputs, target = None, 0
        if isinstance(row, dict):
            inputs = row.get("data") or row.get("body")
            target = row.get("target") or 0
        return self.get_insights(data_preprocess, inputs, target)  # type: ignore[attr-defined]

    def describe_handle(self) -> Any:
        """Returns the model's description; a subclass overrides it."""
        return None

    def get_device(self) -> Any:
        """Returns the device that the model is on."""
        return self.device

    def _is(self, what: str) -> bool:
        return bool(self.context.get_request_header(0, what) == "True")
