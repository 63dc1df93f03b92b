"""Requests made up from the service's own OpenAI document: whatever is asked, nothing ends in a server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from loaders.tokenizer import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from tests.server.conftest import ASSETS, FakeEngine

TOKENIZER = load_tokenizer(ASSETS)
ENGINE = FakeEngine(script=lambda _request: TOKENIZER.encode("<|channel|>final<|message|>Hi.<|return|>"))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(ENGINE, TOKENIZER, ServerConfig()))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_request_causes_a_server_error(operation):
    statuses = set()

    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        response = data.draw(operation.as_strategy()).call()
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        statuses.add(response.status_code)

    run()
    assert statuses
