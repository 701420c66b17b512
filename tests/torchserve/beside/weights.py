"""Makes random weights for an example's model, with the shapes that the example's own code defines.

Runs as a script, with the libraries of the handlers: ``weights.py ORDERS``, where each order in JSON is the folder for
the files, a function of this file, and its arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from base64 import b64encode
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch

_SEED = 7
_MODEL_FILE = "model_file"
_NAMES = ["input_ids", "attention_mask"]
_SENTENCES = ["bloomberg has decided to publish a new report on the global economy", "how is the weather it is nice"]
_CATEGORIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# A module of the name that the handler imports, with what it calls.
_DCGAN = """
import torch

class DCGAN:
    def __init__(self, useGPU, storeAVG):
        self.net = torch.nn.ConvTranspose2d(4, 3, 16)

    def load_state_dict(self, state):
        self.net.load_state_dict(state)

    def buildNoiseDataWithConstraints(self, count, labels):
        generator = torch.Generator().manual_seed(len(labels))
        return torch.randn(count, 4, 1, 1, generator=generator)

    def test(self, batch, getAvG, toCPU):
        return torch.sigmoid(self.net(batch))
"""


def module(path: str) -> None:
    """Writes ``model.pt``, the state of the one module that a model file defines."""
    (made,) = [
        each()
        for each in vars(_model_file(path)).values()
        if isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == _MODEL_FILE
    ]
    torch.save(made.state_dict(), "model.pt")


def _model_file(path: str) -> ModuleType:
    """Imports the file anew, as many model files are called model.py."""
    sys.path.insert(0, str(Path(path).parent))  # it may import files beside it
    spec = importlib.util.spec_from_file_location(_MODEL_FILE, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    sys.path.pop(0)
    return found


def backbone(name: str, file: str) -> None:
    """Writes the weights that a model file would download for its backbone to where ``torch.hub`` looks for them."""
    import torchvision

    place = Path(torch.hub.get_dir()) / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(getattr(torchvision.models, name)().state_dict(), place / file)


def sentiment(path: str) -> None:
    """Writes a small vocabulary for the text classifier, whose own one has 1.3 million words."""
    words = " ".join(_SENTENCES).split()
    pairs = [" ".join(pair) for pair in pairwise(words)]
    vocabulary = {word: place + 1 for place, word in enumerate(dict.fromkeys(words + pairs))}
    vocabulary["<unk>"] = 0
    torch.save(vocabulary, "source_vocab.pt")
    text = _model_file(path).TextSentiment(len(vocabulary), 8, 4)
    torch.jit.script(text).save("model.pt")


def dcgan() -> None:
    with zipfile.ZipFile("models.zip", "w") as archive:
        archive.writestr("models/__init__.py", "")
        archive.writestr("models/DCGAN.py", _DCGAN)
    torch.save(torch.nn.ConvTranspose2d(4, 3, 16).state_dict(), "DCGAN_fashionGen.pth")


def iris() -> None:
    """Trains the classifier on points that resemble those of the data set."""
    from xgboost import XGBClassifier

    centres = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    points = centres.repeat(20, 1) + 0.2 * torch.randn(60, 4)
    classifier = XGBClassifier(n_estimators=5)
    classifier.fit(points.numpy(), [0, 1, 2] * 20)
    classifier.save_model("iris_model.json")


def bert(head: str) -> None:
    """Writes a BERT of one layer with its own vocabulary."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    labels = 9 if head == "BertForTokenClassification" else 2
    config = transformers.BertConfig(vocab_size=_vocabulary(), num_labels=labels, initializer_range=0.5, **sizes)
    getattr(transformers, head)(config).save_pretrained(".", safe_serialization=True)


def distilbert() -> None:
    """Writes a DistilBERT of one layer with two labels, as the file ``pytorch_model.bin``."""
    import transformers

    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2}
    config = transformers.DistilBertConfig(vocab_size=_vocabulary(), initializer_range=0.5, **sizes)
    transformers.DistilBertForSequenceClassification(config).save_pretrained(".", safe_serialization=False)


def _vocabulary() -> int:
    """Writes the tokenizer of a BERT, and returns the number of its tokens."""
    import transformers

    words = sorted({word for sentence in _SENTENCES for word in sentence.split()} | set(".,?"))
    Path("vocab.txt").write_text("\n".join([*_CATEGORIES, *words]))
    transformers.BertTokenizerFast(vocab_file="vocab.txt", do_lower_case=True).save_pretrained(".")
    return len(words) + 5


def llama() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = sorted({word for sentence in _SENTENCES for word in sentence.split()})
    vocabulary = {word: place for place, word in enumerate(["<s>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=_NAMES, **names).save_pretrained("model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=len(vocabulary), initializer_range=0.5, bos_token_id=0, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained("model")


def image() -> None:
    """Writes the body that the client with tensors sends."""
    Path("image.json").write_text(json.dumps({"image": torch.rand(1, 1, 28, 28).tolist()}))


def base64(path: str) -> None:
    Path("kitten.b64").write_bytes(b64encode(Path(path).read_bytes()))


def frames(*images: str) -> None:
    """Writes the body that the video client sends: frames in base64, by name."""
    found = {f"frame{place}": b64encode(Path(path).read_bytes()).decode() for place, path in enumerate(images)}
    Path("frames.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for folder, kind, *arguments in json.loads(sys.argv[1]):
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        torch.manual_seed(_SEED)
        globals()[kind](*arguments)
