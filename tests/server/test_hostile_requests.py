"""Requests of the wrong shape: the error names a field that the client can find in its request."""

import pytest

from server.schema.limits import MAX_PROPERTIES
from tests.server.conftest import MODEL
from tests.tables import rows


@pytest.fixture
def http(service):
    with service.http() as http:
        yield http


@rows(
    "field, value, said",
    ("json", 5, "must be an object, or its JSON text"),
    ("json", [{}], "must be an object, or its JSON text"),
    ("json", {str(n): {} for n in range(MAX_PROPERTIES + 1)}, "keys"),
    ("structural_tag", True, "must be an object, or its JSON text"),
    ("structural_tag", 1.5, "must be an object, or its JSON text"),
)
def test_a_field_of_several_types_is_named_without_its_types(http, field, value, said):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "structured_outputs": {field: value}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"structured_outputs.{field}"
    assert said in error["message"]
