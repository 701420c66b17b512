"""TorchServe's own examples, as data: which files the archiver packs, and which requests the handler gets.

Paths are those of a checkout of pytorch/serve, or of ``made/``, the folder with random weights. None of its files is
changed. Examples that are not run are in left_out.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_IMAGES = "examples/image_classifier"
_JSON = "-H 'Content-Type: application/json'"
_RESNET = f"{_IMAGES}/resnet_18/model.py"
_NAMES = f"{_IMAGES}/index_to_name.json"
_KITTEN = f"{_IMAGES}/kitten.jpg"
_DIGIT = f"{_IMAGES}/mnist/test_data/0.png"
_MNIST = f"{_IMAGES}/mnist/mnist.py"
_TEXTS = "examples/Huggingface_Transformers"
_FRAMES = ("frames", _KITTEN, f"{_IMAGES}/resnet_152_batch/images/dog.jpg")
_STATEFUL = "examples/stateful"


@dataclass(frozen=True)
class Example:
    """``weights`` is the call of weights.py. In ``lines``, ``made/`` stands for the folder of the weights.

    ``config`` has the values of the example's YAML that differ here, or all its settings if it has no file.
    """

    folder: str
    name: str
    handler: str
    lines: Sequence[str]
    weights: Sequence[Sequence[str]]
    model_file: str = ""
    serialized: str = "made/model.pt"
    extra: Sequence[str] = ()
    config_file: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


def _classifier(folder: str, name: str, model_file: str, **more: Any) -> Example:
    lines = [f"curl /predictions/{name} -T {_KITTEN}"]
    return Example(
        folder, name, "image_classifier", lines, [("module", model_file)], model_file, extra=[_NAMES], **more
    )


_TEXT_CONFIG = {
    "model_name": "bert-base-uncased",
    "do_lower_case": True,
    "num_labels": 2,
    "save_mode": "pretrained",
    "max_length": 32,
    "captum_explanation": True,
    "embedding_name": "bert",
    "BetterTransformer": False,
    "model_parallel": False,
}


def _text(mode: str, head: str, artifacts: str, extra: Sequence[str], explains: bool) -> Example:
    """Returns the example of one mode of the general text handler."""
    sample = f"{_TEXTS}/{artifacts}/sample_text_captum_input.txt"
    paths = ("predictions", "explanations") if explains else ("predictions",)
    return Example(
        f"Huggingface_Transformers, {mode}",
        mode.replace(" ", "_"),
        f"{_TEXTS}/Transformer_handler_generalized.py",
        [f"curl -X POST /{path}/{mode.replace(' ', '_')} -T {sample}" for path in paths],
        [("bert", head)],
        serialized="made/model.safetensors",
        extra=["made/config.json", "made/tokenizer.json", "made/tokenizer_config.json", "made/vocab.txt", *extra],
        config={"handler": {**_TEXT_CONFIG, "mode": mode.replace(" ", "_")}},
    )


def _stateful(folder: str, name: str, numbers: Sequence[int]) -> Example:
    header = "-H 'ts_request_sequence_id: one'"
    first = "-H 'ts_request_sequence_start: true'"
    lines = [f"curl /predictions/{name} {header} -d data={number}" for number in numbers]
    lines[0] += f" {first}"
    return Example(
        folder,
        name,
        f"{_STATEFUL}/{folder.partition('/')[2]}/stateful_handler.py",
        lines,
        [("module", f"{_STATEFUL}/model.py")],
        f"{_STATEFUL}/model.py",
        config_file=f"{_STATEFUL}/{folder.partition('/')[2]}/model-config.yaml",
        config={"minWorkers": 1, "maxWorkers": 1, "sequenceMaxIdleMSec": 30_000},
    )


VISION = (
    Example(
        "image_classifier/mnist",
        "mnist",
        f"{_IMAGES}/mnist/mnist_handler.py",
        [
            f"curl /predictions/mnist -T {_DIGIT}",
            f"ts_scripts / mnist {_DIGIT}",
            f"curl /explanations/mnist -T {_DIGIT}",
        ],
        [("module", _MNIST)],
        _MNIST,
    ),
    Example(
        "image_classifier/mnist/torchdata",
        "torchdata",
        f"{_IMAGES}/mnist/torchdata/mnist_handler.py",
        [f"curl /predictions/torchdata {_JSON} --data @made/image.json"],
        [("module", _MNIST), ("image",)],
        _MNIST,
    ),
    Example(
        "custom_metrics",
        "custom_metrics",
        "examples/custom_metrics/mnist_handler.py",
        [f"curl /predictions/custom_metrics -T {_DIGIT}"],
        [("module", _MNIST)],
        _MNIST,
    ),
    _classifier("image_classifier/resnet_18", "resnet-18", _RESNET),
    _classifier("image_classifier/squeezenet", "squeezenet", f"{_IMAGES}/squeezenet/model.py"),
    Example(
        "image_classifier/near_real_time_video",
        "video",
        f"{_IMAGES}/near_real_time_video/near_real_time_video_handler.py",
        [f"curl /predictions/video {_JSON} --data @made/frames.json"],
        [("module", _RESNET), _FRAMES],
        _RESNET,
        extra=[_NAMES],
    ),
    Example(
        "micro_batching",
        "micro_batching",
        "examples/micro_batching/micro_batching_handler.py",
        [f"curl /predictions/micro_batching -T {_KITTEN}"],
        [("module", _RESNET)],
        _RESNET,
        extra=[_NAMES],
        config_file="examples/micro_batching/config.yaml",
    ),
    Example(
        "Workflows/dog_breed_classification, its classifier of cats and dogs",
        "cat_dog",
        "examples/Workflows/dog_breed_classification/cat_dog_classification_handler.py",
        ["curl /predictions/cat_dog -T made/kitten.b64"],
        [("module", "examples/Workflows/dog_breed_classification/cat_dog_classification_arch.py"), ("base64", _KITTEN)],
        "examples/Workflows/dog_breed_classification/cat_dog_classification_arch.py",
    ),
    Example(
        "pt2/torch_inductor_caching",
        "caching",
        "examples/pt2/torch_inductor_caching/caching_handler.py",
        [f"curl /predictions/caching -T {_KITTEN}"],
        [("module", f"{_IMAGES}/squeezenet/model.py")],
        f"{_IMAGES}/squeezenet/model.py",
        extra=[_NAMES],
        config={"handler": {"torch_inductor_caching": {"torch_inductor_fx_graph_cache": True}}},
    ),
)
DENSE = (
    Example(
        "image_segmenter/fcn",
        "fcn",
        "image_segmenter",
        ["curl /predictions/fcn -T examples/image_segmenter/persons.jpg"],
        [("backbone", "resnet101", "resnet101-63fe2227.pth"), ("module", "examples/image_segmenter/fcn/model.py")],
        "examples/image_segmenter/fcn/model.py",
        extra=[f"examples/image_segmenter/fcn/{name}.py" for name in ("fcn", "intermediate_layer_getter")],
    ),
)
OTHERS = (
    Example(
        "text_classification",
        "my_text_classifier",
        "text_classifier",
        ["curl /predictions/my_text_classifier -d 'data=Bloomberg has decided to publish a new report'"],
        [("sentiment", "examples/text_classification/model.py")],
        extra=["examples/text_classification/index_to_name.json", "made/source_vocab.pt"],
    ),
    _stateful("stateful/sequence_batching", "sequences", (1, 2, 4)),
    _stateful("stateful/sequence_continuous_batching", "continuous", (2, 4, 0)),
    Example(
        "dcgan_fashiongen",
        "dcgan_fashiongen",
        "examples/dcgan_fashiongen/dcgan_fashiongen_handler.py",
        [
            f"curl -X POST -d '{{\"number_of_images\": {count}}}' {_JSON} /predictions/dcgan_fashiongen"
            for count in (1, 64)
        ],
        [("dcgan",)],
        serialized="made/DCGAN_fashionGen.pth",
        extra=["made/models.zip"],
    ),
    Example(
        "xgboost_classfication",
        "xgb_iris",
        "examples/xgboost_classfication/xgboost_iris_handler.py",
        [f"curl -X POST /predictions/xgb_iris -T examples/xgboost_classfication/sample_input_{n}.txt" for n in (1, 2)],
        [("iris",)],
        serialized="made/iris_model.json",
        extra=["examples/xgboost_classfication/index_to_name.json"],
        config_file="examples/xgboost_classfication/model-config.yaml",
    ),
)
_LLAMA = {
    "model_name": "tiny",
    "model_path": ".",
    "max_length": 50,
    "max_new_tokens": 8,
    "manual_seed": 40,
    "quantization": False,
}
TRANSFORMERS_4 = (
    _text(
        "sequence classification",
        "BertForSequenceClassification",
        "Seq_classification_artifacts",
        [f"{_TEXTS}/Seq_classification_artifacts/index_to_name.json"],
        True,
    ),
    _text(
        "token classification",
        "BertForTokenClassification",
        "Token_classification_artifacts",
        [f"{_TEXTS}/Token_classification_artifacts/index_to_name.json"],
        False,
    ),
    _text("question answering", "BertForQuestionAnswering", "QA_artifacts", [], False),
    Example(
        "large_models/Huggingface_accelerate/llama",
        "llama",
        "examples/large_models/Huggingface_accelerate/llama/custom_handler.py",
        ["curl /predictions/llama -T examples/large_models/Huggingface_accelerate/llama/sample_text.txt"],
        [("llama",)],
        serialized="",
        extra=["made/model"],
        config={"deviceType": "cpu", "handler": _LLAMA},
    ),
)
GROUPS: Mapping[str, Sequence[Example]] = {
    "vision": VISION,
    "dense": DENSE,
    "others": OTHERS,
    "transformers 4": TRANSFORMERS_4,
}
