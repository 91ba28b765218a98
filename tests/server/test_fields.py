"""Every field of every request with every kind of value: the server serves it or refuses it, and never fails."""

import pytest
from http_server import error_of

from lean.server.openapi import BODIES

SHORT = {"max_tokens": 2, "logit_bias": {"2": 100}}  # 2 ends a sequence
BASES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **SHORT},
    "/v1/completions": {"prompt": "a", **SHORT},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
VALUES = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 0.5, 1e-8, 1e9, 1e308, "", "a", "1", "\x00", "é😀",
    [], [None], [0], [10**6], [""], ["a"], [[]], [[0]], [{}], {}, {"a": None}, {"1": 1}, {"1": 1e308},
)  # fmt: skip


FIELDS = sorted({field for body in BODIES.values() for field in body.model_fields})


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_value_of_a_field_makes_the_server_fail(server, path):
    """Also not of a field that only another path has."""
    for field in FIELDS:
        for value in VALUES:
            response = server.post(path, {**BASES[path], field: value})
            if response.status_code != 200:
                status, param, message = error_of(response)
                assert status in (400, 404), (field, value, message)
                assert param, (field, value, message)


@pytest.mark.parametrize("field", ["role", "content", "name", "refusal", "tool_calls", "type"])
def test_no_value_in_a_message_makes_the_server_fail(server, field):
    for value in VALUES:
        for message in ({"role": "user", "content": None, field: value}, {"role": "user", "content": [{field: value}]}):
            response = server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
            if response.status_code != 200:
                status, param, error = error_of(response)
                assert (status, param.partition("[")[0]) == (400, "messages"), (message, error)
