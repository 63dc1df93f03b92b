"""RMS norm in fp64 is what both of its forms compute, the one for few rows and the one for many."""

import itertools

import pytest
import torch

from model.norm import RmsNorm

EPS = 1e-5


def test_it_is_x_over_its_root_mean_square(subtests: pytest.Subtests) -> None:
    for dtype, size, num_rows in itertools.product(
        [torch.float32, torch.bfloat16], [1.0, 3e-3, 0.0], [0, 1, 16, 17, 40]
    ):
        with subtests.test(dtype=dtype, size=size, num_rows=num_rows):
            generator = torch.Generator().manual_seed(num_rows)
            x = (size * torch.randn(num_rows, 96, generator=generator)).to(dtype)
            weight = torch.randn(96, generator=generator)
            got = RmsNorm(weight, EPS)(x)
            exact = x.double()
            want = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=1e-7)
