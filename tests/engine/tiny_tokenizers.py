"""Small tokenizers of the three common kinds, trained in a moment on a few sentences.

Does not use the code under test.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model streams its answer, token by token; it's fun.",
    "Grüße aus Köln: 5 €, naïve café.",
    "日本語のテキストも少し。 🙂🚀",
    "  two  spaces\n\tand a tab",
)


def byte_level(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer like those of GPT-2, Llama 3, Qwen and SmolLM2; with ``bos``, it puts <s> before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def fused_byte_level() -> PreTrainedTokenizerFast:
    """``byte_level`` with a second decoder, which changes nothing."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer like those of Llama 2 and Mistral: ▁ for spaces, byte fallback, one leading space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for text in SENTENCES[:3] for char in text.replace(" ", "▁") if ord(char) < 0x2000})
    vocab = {
        chunk: i for i, chunk in enumerate(dict.fromkeys([*words, "▁", *letters, "▁t", "▁th", "▁the", "er", "▁▁"]))
    }
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("e", "r"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's: pieces within a word begin with ##; decoding puts spaces between the others."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")
