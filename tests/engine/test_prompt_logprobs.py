"""Log-probabilities of prompts are computed a few rows at a time, with the results of all rows at once."""

import torch

from engine import logprobs
from engine.logprobs import launch_logprobs, launch_prompt_logprobs
from tests.tables import rows

VOCAB = 37


@rows("num_rows, num_top", (0, 2), (1, 0), (64, 3), (65, 3), (200, 0), (200, VOCAB), (200, VOCAB + 1))
def test_blocks_of_rows_give_the_results_of_all_rows(num_rows: int, num_top: int) -> None:
    logits_RV, ids_R = torch.randn(num_rows, VOCAB), torch.randint(VOCAB, (num_rows,))
    want = launch_logprobs(torch.log_softmax(logits_RV, dim=-1), ids_R, num_top).read()
    got = launch_prompt_logprobs(logits_RV, ids_R, num_top).read()
    assert [(entry.token_id, entry.top) for entry in got] == [(entry.token_id, entry.top) for entry in want]
    assert torch.tensor([entry.logprob for entry in got]).equal(torch.tensor([entry.logprob for entry in want]))
    assert len(got) == num_rows


def test_no_temporary_is_as_large_as_the_logits(monkeypatch) -> None:
    sizes, log_softmax = [], torch.log_softmax

    def noted(rows_RV: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(len(rows_RV))
        return log_softmax(rows_RV, dim=dim)

    monkeypatch.setattr(torch, "log_softmax", noted)
    launch_prompt_logprobs(torch.randn(1000, VOCAB), torch.zeros(1000, dtype=torch.int64), 1)
    assert sum(sizes) == 1000
    assert max(sizes) <= logprobs._BLOCK_ROWS < 100
