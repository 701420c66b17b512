"""What several test rooms share. Imports no torch: the torch-free rooms run without it.

A fixture that needs torch imports it when it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model streams its answer token by token.",
    "Grüße aus Köln, mit Umlauten und einem Euro: 5 €.",
    "日本語のテキストも少し。 Emoji: 🙂🚀",
    "Numbers 0 1 2 3 4 5 6 7 8 9 and brackets () [] {}.",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY_VOCAB = 400
TINY_CONTEXT = 1024
_ROOMS_OF_SERVERS = {"reliability", "server"}  # share servers: each process would start its own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes: what shares servers or a module's fixtures runs in one of them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            room = file.split("/")[1]
            return room if room in _ROOMS_OF_SERVERS else file

    return ByRoom(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama: fp32, two layers, a byte-level tokenizer of its own, a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    _save_tokenizer(folder)
    _save_model(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
