"""A model whose answer is known beforehand: it recites one text for ever, a byte per token.

It is a real Llama, whose layers add nothing and whose head maps each byte of the text to the next one. Each byte occurs
only once in the text, so the next one is always the same.
"""

from __future__ import annotations

from pathlib import Path

TEXT = "Hey,bring-duck foxé.€ж🚀日ת"
LOOP = len(TEXT.encode())  # tokens after which it begins anew
CONTEXT = 4096
_SPECIAL = ("<s>", "</s>")
_HIDDEN = 264  # one number per token, and heads of an even size
_SURE = 4.0  # the next token's logit is this times 16; the others' are noise, without which loading trusts no batch


def recital(tokens: int, after: str = "o") -> str:
    """Returns the answer to a prompt that ends with this character of the text; tests send "Hello"."""
    begin = TEXT.encode().index(after.encode()) + len(after.encode())
    spoken = (TEXT.encode() * (tokens // LOOP + 2))[begin : begin + tokens]
    return spoken.decode(errors="replace")


def save(folder: Path) -> None:
    ids = _save_tokenizer(folder)
    _save_model(folder, dict(zip(ids, [*ids[1:], ids[0]], strict=True)))


def _save_tokenizer(folder: Path) -> list[int]:
    """Writes a tokenizer with one token for each byte. Returns the ids of the text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {token: len(vocabulary) + index for index, token in enumerate(_SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    fast.save_pretrained(folder)
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) == len(set(ids)) == LOOP
    return ids


def _save_model(folder: Path, following: dict[int, int]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256 + len(_SPECIAL),
        hidden_size=_HIDDEN,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(config.vocab_size, _HIDDEN))
        torch.nn.init.normal_(model.lm_head.weight, std=0.02, generator=torch.Generator().manual_seed(7))
        for token, successor in following.items():
            model.lm_head.weight[successor, token] = _SURE
    model.save_pretrained(folder)
