"""The hashed noise has the Gumbel distribution, and is independent along every counter."""

from __future__ import annotations

import math

import pytest
import torch

from mlserver_torch_stream.engine.sampling.row_sampler import derive_key, gumbel

_N = 200_000


def _uniform(keys: list[int], ids: torch.Tensor) -> torch.Tensor:
    """Maps the noise through the Gumbel distribution function: uniform in (0, 1) if it is Gumbel noise."""
    return torch.exp(-torch.exp(-gumbel(keys, ids).double()))


def _streams() -> dict[str, torch.Tensor]:
    row = derive_key(derive_key(0, 42), 0)
    one_id = torch.tensor([17])
    return {
        "ids": _uniform([derive_key(row, 0)], torch.arange(_N))[0],
        "positions": _uniform([derive_key(row, position) for position in range(_N)], one_id)[:, 0],
        "seeds": _uniform([derive_key(derive_key(derive_key(0, s), 0), 0) for s in range(_N)], one_id)[:, 0],
        "samples": _uniform([derive_key(derive_key(derive_key(0, 7), n), 3) for n in range(_N)], one_id)[:, 0],
    }


@pytest.fixture(scope="module")
def streams() -> dict[str, torch.Tensor]:
    return _streams()


@pytest.mark.parametrize("along", ["ids", "positions", "seeds", "samples"])
def test_it_is_gumbel_noise(streams: dict[str, torch.Tensor], along: str) -> None:
    counts = torch.histc(streams[along], bins=256, min=0, max=1)
    chi_square = float(((counts - _N / 256) ** 2 / (_N / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 64, 128])
@pytest.mark.parametrize("along", ["ids", "positions", "seeds", "samples"])
def test_neighbours_are_independent(streams: dict[str, torch.Tensor], along: str, lag: int) -> None:
    values = streams[along]
    pairs = (values[:-lag] * 16).long() * 16 + (values[lag:] * 16).long()
    counts = torch.bincount(pairs, minlength=256).double()
    expected = len(pairs) / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 6 * math.sqrt(2 * 255)


def test_streams_of_neighbouring_positions_are_uncorrelated() -> None:
    row = derive_key(derive_key(0, 1), 0)
    keys = [derive_key(row, position) for position in range(40)] + [derive_key(derive_key(0, s), 0) for s in range(40)]
    correlations = torch.corrcoef(_uniform(keys, torch.arange(20_000)))
    off_diagonal = correlations[~torch.eye(80, dtype=torch.bool)]
    assert float(off_diagonal.abs().max()) < 5 / math.sqrt(20_000)


def test_it_is_finite_and_the_same_in_any_shape() -> None:
    keys = [derive_key(0, seed) for seed in (-1, 0, 2**64 - 1, 2**70)]
    assert keys[0] == keys[2]
    ids = torch.arange(50_000)
    noise = gumbel(keys, ids)
    assert noise.dtype == torch.float32
    assert bool(noise.isfinite().all())
    assert torch.equal(gumbel(keys[1:2], ids[None, ::7])[0], noise[1, ::7])


def test_it_stays_as_it_is() -> None:
    """A seed must give the same tokens after an upgrade of this package."""
    noise = gumbel([derive_key(derive_key(derive_key(0, 1), 0), 0)], torch.tensor([0, 1, 49151]))
    torch.testing.assert_close(noise, torch.tensor([[-0.785134, 7.460192, -0.793660]]), atol=1e-5, rtol=0)
