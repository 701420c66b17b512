"""Compares the argmax that the kernels return with the argmax of their logits."""

from __future__ import annotations

import torch

from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from tests.engine.page_book import PageBook

ROWS = (1, 2, 5, 16, 17, 33, 70)
NAN_TOKEN, INFINITE_ID = 9, 3


def give_ties_and_infinities(model: torch.nn.Module, *, infinite: bool = True) -> None:
    """Makes each logit occur twice, one logit infinite with either sign, and the logits after one token NaN."""
    table = model.get_output_embeddings().weight.data
    if infinite:
        table[INFINITE_ID, 0] = torch.inf
    table[table.shape[0] // 2 :] = table[: -(-table.shape[0] // 2)].flip(0)
    model.get_input_embeddings().weight.data[NAN_TOKEN] = torch.nan


def plain_argmax(logits: torch.Tensor) -> list[int]:
    """Returns the first index of each row's largest logit; -1 if that logit is NaN or infinite."""
    largest = logits.amax(dim=-1, keepdim=True)
    return torch.where(largest[:, 0].isfinite(), (logits == largest).int().argmax(dim=-1), -1).tolist()


def check_argmax(model: torch.nn.Module, forward: Forward) -> list[int]:
    """Compares the argmax in steps with different numbers of rows. Returns all ids that were found."""
    found: list[int] = []
    for rows in ROWS:
        book = PageBook(model, pages=2 * rows)
        work = {str(row): [(11 * row + at) % 250 for at in range(1 + row % 3)] for row in range(rows)}
        for ids in (work, {name: [(7 * int(name) + rows) % 250] for name in work}):
            found += _checked(forward(book.batch(ids, {name: len(each) for name, each in ids.items()}), book.cache))
            for name, each in ids.items():
                book.held[name].computed += len(each)
    book = PageBook(model)
    long = {name: [(13 * at + first) % 250 for at in range(300)] for first, name in enumerate("abc")}
    return found + _checked(forward(book.batch(long, 5), book.cache))  # in two calls of the kernels


def _checked(logits: Logits) -> list[int]:
    assert logits.argmax is not None
    found = list(logits.argmax[: len(logits.tensor)])
    assert found == plain_argmax(logits.tensor)
    return found
