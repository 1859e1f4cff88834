"""Sampling parameters: ranges, defaults, and what of them reaches the engine."""

import pytest

from tests.serve.http.fake import VOCAB, Fake, chat, client

pytestmark = pytest.mark.anyio
STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def fake(tok):
    return Fake(tok, script=lambda request: "héllo")


SAMPLING = [
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "1"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"min_p": 1.5},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0},
    {"seed": 2**63},
    {"seed": 0.5},
    {"n": 0},
    {"n": 129},
    {"stop": [""]},
    {"stop": ["a"] * 33},
    {"stop": [1]},
    {"logit_bias": {str(VOCAB): 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"9" * 5000: 1}},
    {"max_tokens": 0},
    {"max_completion_tokens": 0},
    {"min_tokens": 5, "max_tokens": 4},
    {"top_logprobs": 2},
    {"top_logprobs": 21, "logprobs": True},
    {"regex": "a", "grammar": 'start: "a"'},
    {"regex": "a", "response_format": {"type": "json_object"}},
    {"grammar": "start: ("},
    {"stream_options": {"include_usage": "yes"}},
]


@STREAMS
@pytest.mark.parametrize("fields", SAMPLING, ids=lambda fields: str(fields)[:40])
async def test_values_out_of_range(fake, fields, stream):
    async with client(fake) as c:
        response = await chat(c, **{"stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400 and "\n" not in error["message"]
    assert any(name in f"{error['param']} {error['message']}" for name in fields)
    assert fake.requests == []


async def test_sampling_reaches_the_engine(fake, tok):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 3,
        "logit_bias": {"5": -100, "6": 2.5},
        "stop_token_ids": [9],
        "max_completion_tokens": 50,
        "max_tokens": 60,
        "min_tokens": 4,
        "priority": 2,
    }
    async with client(fake, temperature=0.7) as c:
        await chat(c, **fields)
        await chat(c, top_k=-1)
    request, default = fake.requests
    how = request.sampling
    assert (how.temperature, how.top_p, how.top_k, how.min_p, how.seed) == (0.5, 0.9, 40, 0.1, 3)
    assert (how.presence_penalty, how.frequency_penalty, how.repetition_penalty) == (1, -1, 1.5)
    assert how.logit_bias == {5: -100, 6: 2.5}
    assert how.stop_ids == (*tok.stop_ids, 9)
    assert (how.max_new_tokens, how.min_new_tokens, request.priority) == (50, 4, 2)
    assert (default.sampling.temperature, default.sampling.top_p, default.sampling.top_k) == (0.7, 1.0, 0)
    assert default.sampling.max_new_tokens == fake.limit - len(default.prompt)


@pytest.mark.parametrize("length", [999, 1000, 1500])
async def test_prompts_against_the_longest_request(fake, length):
    """The limit is in the text of the refusal; a prompt that fits gets as many tokens as fit behind it."""
    fake.limit = 1000
    async with client(fake) as c:
        response = await c.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": 32768})
        assert (await c.post("/v1/completions", json={"prompt": [5] * 10})).status_code == 200
    if length == 999:
        assert response.status_code == 200 and fake.requests[0].sampling.max_new_tokens == 1
    else:
        assert response.status_code == 400 and "999" in response.json()["message"]
        assert response.json()["code"] == "context_length_exceeded"
