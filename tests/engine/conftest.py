"""Fixtures of the engine tests."""

from functools import partial

import pytest

from tests.engine.fakes import fake_core


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def make_core(request):
    """`fake_core`, in both orders of steps."""
    return partial(fake_core, overlap=request.param)
