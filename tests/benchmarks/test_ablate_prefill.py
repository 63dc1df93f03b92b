"""The ablations of the prefill kernel still fit its source."""

from pathlib import Path

import pytest

from benchmarks import ablate_prefill


def test_every_variant_fits_the_kernel_of_today(tmp_path: Path) -> None:
    whole = (ablate_prefill.ROOT / "moe" / "kernels" / "products.py").read_text()
    for index, name in enumerate(ablate_prefill.VARIANTS):
        copy = ablate_prefill._copy(tmp_path / str(index), name) / "moe" / "kernels" / "products.py"
        assert (copy.read_text() == whole) == (name == "whole kernel"), name


def test_a_variant_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ablate_prefill.VARIANTS, "gone", [("no such line", "")])
    with pytest.raises(ValueError, match=r"'gone' does not fit products\.py"):
        ablate_prefill._copy(tmp_path / "copy", "gone")
