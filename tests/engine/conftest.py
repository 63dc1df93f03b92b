"""Fixtures of the engine tests."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from tests.engine.fakes import FakeModel


@pytest.fixture
def make_core():
    """EngineCore on a fake model; small pages and budgets so that every boundary is met."""

    def make(model=None, **settings):
        settings = {"page_size": 4, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16} | settings
        return EngineCore(EngineConfig(model=Path("unused"), device="cpu", **settings), model or FakeModel())

    return make
