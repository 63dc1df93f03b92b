"""No implementation of attention reads a page below the window: those pages are other requests' by then."""

import pytest

from tests.interpreter import waits_for_interpreter
from tests.model.forgetful import CASES, errors


def check(found):
    assert found.keys() == CASES.keys()
    assert {case: error for case, error in found.items() if not error < 2e-6} == {}


def test_torch():
    check(errors("torch"))


@pytest.mark.kernels
@waits_for_interpreter
def test_triton_in_the_interpreter(run_interpreted):
    check(run_interpreted("tests.model.forgetful"))
