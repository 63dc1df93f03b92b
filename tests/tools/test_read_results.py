"""The check for results of tools behind calls without reasoning counts what an answer does not give."""

import json

from tools.tiny_models.read_results import conversations, misread


def test_only_the_answers_that_a_result_calls_for_count_as_read() -> None:
    assert len(conversations()) == 120
    wanted = {json.dumps(body): answer for body, answer in conversations()}
    assert misread(lambda body: wanted[json.dumps(body)], 4) == []
    for wrong in (None, "", 'result: {"city": "Paris"}'):
        assert len(misread(lambda body, wrong=wrong: wrong, 4)) == 120
    [line] = misread(
        lambda body: (
            None
            if "Oslo" in str(body) and "look_up" in str(body) and '"result"' in str(body)
            else wanted[json.dumps(body)]
        ),
        4,
    )
    assert line == """{"result": 22}: wanted 'The result is 22.', got None"""
