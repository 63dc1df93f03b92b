"""Fixtures of the model tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """The engine calls models under inference mode; transformers' models do not mind."""
    with torch.inference_mode():
        yield
