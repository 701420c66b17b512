"""Makes prompts of given lengths in tokens, no two with the same beginning, and the same for every server of a run.

Needs only the tokenizer's file, and nothing of the model.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.answers import Ask

_VOCABULARY = """
river bridge glacier violin harbour desert comet garden winter market lantern forest engine castle letter island
teacher sailor painter farmer doctor pilot singer builder writer keeper stranger captain neighbour traveller
carries watches follows remembers repairs paints measures crosses studies gathers answers explains discovers slowly
quietly often never always suddenly carefully almost again together early late quickly once twice old bright heavy
silent narrow golden distant broken gentle hidden wooden frozen simple curious ancient empty under over behind
beside between through against without before after during toward along across near the a every another some many
few their our its this that and but because while until although where when which
"""
_ENGLISH = Path(__file__).parent / "english.txt"
_SLACK = 1  # a prompt of 128 tokens may have 127 to 129


class Prompts:
    """Makes prompts. ``seed`` determines them all; ``text`` never returns the same prompt for different labels."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._words = _VOCABULARY.split()
        self._seed = seed

    def text(self, tokens: int, *label: object) -> tuple[str, int]:
        """Returns a prompt of about ``tokens`` tokens, and its exact number of tokens."""
        for attempt in range(100):
            dice = random.Random(f"{self._seed} {label} {attempt}")
            # Two random numbers first: no two prompts share more than a few tokens, so no prefix is ever cached.
            text = f"Story {dice.randrange(10**6)} of {dice.randrange(10**6)}. {self._prose(dice, tokens)}"
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if abs((count := self.count(text)) - tokens) <= _SLACK:
                return text, count
        raise ValueError(f"no text of {tokens} tokens was found for this tokenizer")

    def asks(self, count: int, tokens: int, new_tokens: int, *label: object) -> list[Ask]:
        """Returns requests with prompts of one length, answered greedily."""
        return [Ask(*self.text(tokens, *label, index), new_tokens) for index in range(count)]

    def passage(self, tokens: int, *label: object) -> tuple[str, int]:
        """Returns English prose that begins at a random place, and its number of tokens."""
        ids = self._tokenizer.encode(_ENGLISH.read_text(encoding="utf-8"), add_special_tokens=False).ids
        start = random.Random(f"{self._seed} {label}").randrange(len(ids) - tokens)
        text = self._tokenizer.decode(ids[start : start + tokens], skip_special_tokens=False)
        return text, self.count(text)

    def count(self, text: str) -> int:
        """Counts tokens as a server does: with the special tokens that the tokenizer adds to every text."""
        return len(self._tokenizer.encode(text).ids)

    def _prose(self, dice: random.Random, words: int) -> str:
        sentences = []
        while words > 0:
            length = dice.randint(6, 14)
            sentences.append(" ".join(dice.choices(self._words, k=length)).capitalize() + ".")
            words -= length
        return " ".join(sentences)
