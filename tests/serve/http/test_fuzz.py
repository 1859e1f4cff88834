"""Requests that a fuzzer makes from the server's own OpenAPI document: none gives a status of 500 or above."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

from serve.http.app import create_app
from tests.serve.http.fake import Fake


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        (GenerationMode.NEGATIVE, 2),
        pytest.param(GenerationMode.NEGATIVE, 60, marks=pytest.mark.slow),
        pytest.param(GenerationMode.POSITIVE, 60, marks=pytest.mark.slow),
    ],
)
def test_no_server_errors(tok, mode, examples):
    """Valid requests and spoilt ones, for every operation."""
    app = create_app(Fake(tok, script=lambda request: "Hi.", step=100), tok)
    operations = [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert len(operations) > 12
    statuses = set()
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing to spoil

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            response = case.call()
            statuses.add(response.status_code)
            assert response.status_code < 500, (case.path, case.body, response.text)
            assert response.status_code < 400 or response.json()["error"]["message"]

        check()
    assert 400 in statuses and (200 in statuses or mode is GenerationMode.NEGATIVE)
