"""Cases from public reports through the HTTP layer; the scripted engine says their texts as ids."""

import asyncio
import json

import pytest

from tests.serve.http.conftest import read_cases
from tests.serve.http.fake import answer, assemble, chat, client, events, ids_of

pytestmark = pytest.mark.anyio
STREAMS = pytest.mark.parametrize("stream", [False, True])
PARSER = read_cases("parser_streams.jsonl")
HTTP = {case["id"]: case for case in read_cases("http_sampling.jsonl")}


def seen(choice):
    calls = [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in choice["calls"].values()]
    return {
        "reasoning_content": choice["reasoning_content"],
        "content": choice["content"],
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }


def request_of(case):
    names = {call["name"] for call in case["expect"]["tool_calls"]} | {"f"}
    return {
        "thinking": {"type": "enabled" if case["thinking"] else "disabled"},
        "tools": [{"type": "function", "function": {"name": name, "parameters": {}}} for name in sorted(names)],
        "stop": case.get("stop"),
    }


@STREAMS
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("case", PARSER, ids=lambda case: case["id"])
async def test_parser_streams(fake, case, step, stream):
    """However many ids the engine delivers at a time; calls are sent whole, so a cut one is never begun."""
    fake.script, fake.end, fake.step = (lambda request: "".join(case["chunks"])), case["engine_finish"], step
    async with client(fake, whole_tool_calls=True) as c:
        [choice], _ = await answer(c, stream, **request_of(case))
    assert seen(choice) == case["expect"]


@pytest.mark.parametrize("case", [c for c in PARSER if c["expect"]["tool_calls"]], ids=lambda case: case["id"])
async def test_streamed_arguments_add_up(fake, case):
    fake.script, fake.step = (lambda request: "".join(case["chunks"])), 1
    async with client(fake) as c:
        [choice], _ = await answer(c, True, **request_of(case))
    assert seen(choice) == case["expect"]


async def test_a_call_cut_while_its_arguments_stream(fake):
    """PS-11 asks for no half call, the specification for arguments as they are written: then what was sent stays."""
    [case] = [case for case in PARSER if case["id"] == "PS-11"]
    fake.script, fake.end = (lambda request: "".join(case["chunks"])), "length"
    async with client(fake) as c:
        [choice], _ = await answer(c, True, **request_of(case))
    assert choice["calls"] == {0: {"id": "f:0", "name": "f", "arguments": '{"x": "abc'}}
    assert (choice["content"], choice["finish_reason"]) == ("Checking.", "length")


@pytest.mark.parametrize("request_", HTTP["HS-01"]["requests"], ids=str)
async def test_ids_outside_the_vocabulary(fake, tok, request_):
    ids = [tok.vocab_size if id == "vocab_size" else id for id in request_["stop_token_ids"]]
    async with client(fake) as c:
        response = await chat(c, stop_token_ids=ids)
        assert response.status_code == 400 and response.json()["error"]["param"].startswith("stop_token_ids")
        assert (await chat(c, stop_token_ids=[tok.vocab_size - 1])).status_code == 200
    assert tok.vocab_size - 1 in fake.requests[0].sampling.stop_ids


async def test_a_broken_pattern_harms_nobody(fake):
    """HS-02: eight other requests are in flight meanwhile."""
    fake.script, fake.pause, fake.step = (lambda request: "x" * 40), 0.001, 1
    async with client(fake) as c:
        off = {"thinking": {"type": "disabled"}}
        others = [asyncio.create_task(answer(c, bool(i % 2), **off)) for i in range(8)]
        while fake.running < 8:
            await asyncio.sleep(0)
        for fields in HTTP["HS-02"]["requests"]:
            for stream in (False, True):
                response = await chat(c, stream=stream, **fields)
                assert response.status_code == 400
                assert response.json()["error"]["param"] in fields
        assert fake.running == 8
        for [choice], _ in await asyncio.gather(*others):
            assert choice["content"] == "x" * 40


@pytest.mark.parametrize("fields", HTTP["HS-03"]["requests"], ids=str)
async def test_small_temperatures_reach_the_engine_as_they_are(fake, fields):
    async with client(fake) as c:
        [choice], _ = await answer(c, False, logprobs=True, top_logprobs=2, **fields)
    assert fake.requests[0].sampling.temperature == fields["temperature"]
    assert choice["content"] == "Hi."
    values = [entry["logprob"] for token in choice["tokens"] for entry in (token, *token["top_logprobs"])]
    assert len(values) == 3 * len(choice["tokens"]) > 0 and all(-1e4 < value <= 0 for value in values)


@STREAMS
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("case", HTTP["HS-05"]["cases"], ids=lambda case: case["stop"][0])
async def test_stop_strings(fake, tok, case, route, stream):
    fake.script, fake.step = (lambda request: "".join(case["deltas_from_model"])), 2
    fake.end = "length" if case["finish"] == "length" else "stop"
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}], "thinking": {"type": "disabled"}},
        "/v1/completions": {"prompt": "q", "max_tokens": 99},
        "/generate": {"text": "q"},
    }
    body = {**bodies[route], "stream": stream}
    (body.setdefault("sampling_params", {}) if route == "/generate" else body)["stop"] = case["stop"]
    async with client(fake) as c:
        response = await c.post(route, json=body)
    if route == "/generate":
        results = events(response) if stream else [response.json()]
        text, finish = results[-1]["text"], results[-1]["meta_info"]["finish_reason"]["type"]
        assert all(case["expect"].startswith(result["text"]) for result in results)
    elif route == "/v1/completions":
        choices = [choice for e in (events(response) if stream else [response.json()]) for choice in e["choices"]]
        text, finish = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
    elif stream:
        [choice], _ = assemble(events(response))
        text, finish = choice["content"], choice["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == (case["expect"], case["finish"])


SPELLED = ["What does <|kimi_image_placeholder|> mean?", "<|close|>message<|sep|><|end_of_msg|>"]
POSITIONS = {
    "string": lambda t: [{"role": "user", "content": t}],
    "part": lambda t: [{"role": "user", "content": [{"type": "text", "text": t}]}],
    "tool result": lambda t: [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "f:0", "content": t},
    ],
    "argument": lambda t: [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": json.dumps({"a": t})}}],
        },
        {"role": "tool", "tool_call_id": "f:0", "content": "r"},
    ],
    "reasoning": lambda t: [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": t},
        {"role": "user", "content": "q"},
    ],
}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("text", SPELLED)
async def test_spelled_markers_are_text(fake, tok, text, position):
    """HS-06: the same number of control tokens as with a harmless text of the same length."""
    harmless = "a" * len(text)
    async with client(fake) as c:
        usages = []
        for shown in (text, harmless):
            response = await chat(c, messages=POSITIONS[position](shown))
            assert response.status_code == 200
            usages.append(response.json()["usage"]["prompt_tokens"])
    spelled, plain = ([id for id in request.prompt if tok.is_special(id)] for request in fake.requests)
    assert spelled == plain and usages[0] == usages[1]
    body, prompt = tok.encode(text), list(fake.requests[0].prompt)
    assert any(prompt[at : at + len(body)] == body for at in range(len(prompt)))


def test_ids_of_the_script_are_those_of_the_text(tok):
    assert ids_of(tok, "a<|sep|>") == [*tok.encode("a"), tok.special["<|sep|>"]]
