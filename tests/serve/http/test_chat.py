"""Chat completions against a scripted engine, streaming and not."""

import pytest

from serve.http.backend import Unavailable
from tests.serve.http.fake import answer, assemble, chat, client, events

pytestmark = pytest.mark.anyio
BOTH = pytest.mark.parametrize("stream", [False, True])
TURN = "Plan.<|close|>think<|sep|><|open|>response<|sep|>né 5 < 7<|close|>response<|sep|><|close|>message<|sep|>"
CALLS = (
    "x<|close|>think<|sep|><|open|>response<|sep|>On it.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>"ß" and more'
    '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|>"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


@BOTH
async def test_a_turn(fake, stream):
    fake.script = lambda request: TURN
    fake.cached = 5
    async with client(fake) as c:
        [choice], usage = await answer(c, stream)
    assert (choice["reasoning_content"], choice["content"]) == ("Plan.", "né 5 < 7")
    assert choice["finish_reason"] == "stop"
    # Byte tokens: 5 of reasoning, 8 of content, 4 names of 5 + 8 + 8 + 7, 10 control tokens. No stop id is drawn, for
    # the closed message ends the turn. The opened think channel is no part of the reported prompt.
    completion = 5 + 9 + 5 + 8 + 8 + 7 + 8
    billed = len(fake.requests[0].prompt) - (1 + len("think") + 1)
    assert usage == {
        "prompt_tokens": billed,
        "completion_tokens": completion,
        "total_tokens": billed + completion,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 5},
        "reasoning_tokens": 5,
    }
    assert fake.running == 0


@BOTH
async def test_without_thinking(fake, tok, stream):
    fake.script = lambda request: "Hi<|close|>response<|sep|>"
    async with client(fake) as c:
        [choice], usage = await answer(c, stream, thinking={"type": "disabled"})
    assert (choice["reasoning_content"], choice["content"], choice["matched_stop"]) == ("", "Hi", tok.stop_ids[0])
    assert usage["completion_tokens"] == 2 + 1 + 8 + 1 + 1  # the stop id is drawn, and counted


@BOTH
async def test_parallel_calls(fake, stream):
    fake.script, fake.step = (lambda request: CALLS), 1
    history = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "f:0", "content": "r"},
    ]
    async with client(fake) as c:
        [choice], _ = await answer(c, stream, messages=history, tools=TOOLS)
    assert choice["content"] == "On it."
    assert choice["finish_reason"] == "tool_calls"
    assert choice["calls"] == {
        0: {"id": "f:1", "name": "f", "arguments": '{"k": "\\"ß\\" and more"}'},
        1: {"id": "g:2", "name": "g", "arguments": "{}"},
    }


async def test_arguments_stream_while_they_are_written(fake):
    fake.script, fake.step = (lambda request: CALLS), 1
    async with client(fake) as c:
        deltas = [e["choices"][0]["delta"] for e in events(await chat(c, tools=TOOLS, stream=True)) if e["choices"]]
    arguments = [
        call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", ()) if call["index"] == 0
    ]
    assert arguments[:4] == ["", '{"k": "', '\\"', "ß"]
    assert all(
        "name" not in call["function"] or call["type"] == "function" for d in deltas for call in d.get("tool_calls", ())
    )


@BOTH
async def test_calls_of_undeclared_tools_are_hidden(fake, stream):
    fake.script = lambda request: CALLS
    async with client(fake) as c:
        [choice], _ = await answer(c, stream)
    assert (choice["content"], choice["calls"], choice["finish_reason"]) == ("On it.", {}, "stop")


async def test_frame_of_a_stream(fake):
    fake.script = lambda request: TURN
    async with client(fake) as c:
        chunks = events(await chat(c, stream=True))
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "nano")}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    first, *_, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert all("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks[:-1])
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["delta"] == {"content": None, "reasoning_content": None}
    assert last["choices"][0]["usage"] == usage["usage"]
    assert usage["choices"] == []


@pytest.mark.parametrize(
    ("options", "wanted"), [(None, 1), ({}, 1), ({"include_usage": True}, 1), ({"include_usage": False}, 0)]
)
async def test_usage_is_sent_unless_switched_off(fake, options, wanted):
    async with client(fake) as c:
        chunks = events(await chat(c, stream=True, stream_options=options))
    assert sum(not chunk["choices"] for chunk in chunks) == wanted
    assert sum("usage" in choice for chunk in chunks for choice in chunk["choices"]) == wanted


async def test_continuous_usage(fake):
    fake.script = lambda request: TURN
    async with client(fake) as c:
        chunks = events(await chat(c, stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 3 and counts[-1] == 50


@BOTH
async def test_choices_have_seeds_of_their_own(fake, stream):
    fake.script = lambda request: f"{request.sampling.seed}<|close|>response<|sep|>"
    async with client(fake) as c:
        choices, usage = await answer(c, stream, n=3, seed=7, thinking={"type": "disabled"})
    assert [choice["content"] for choice in choices] == ["7", "8", "9"]
    assert usage["completion_tokens"] == 3 * (1 + 10 + 1)
    assert usage["prompt_tokens"] == len(fake.requests[0].prompt) - (1 + len("response") + 1)


async def test_seeds(fake):
    async with client(fake) as c:
        for seed in (None, None, 7, 7, -1, 2**63 - 1, -(2**63)):
            assert (await chat(c, seed=seed)).status_code == 200
    seeds = [request.sampling.seed for request in fake.requests]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds[2] == seeds[3] == 7 and len(set(seeds)) == 6


@BOTH
async def test_logprobs_cover_every_token(fake, tok, stream):
    fake.script = lambda request: "é<|close|>response<|sep|>"
    async with client(fake) as c:
        [choice], _ = await answer(c, stream, logprobs=True, top_logprobs=2, thinking={"type": "disabled"})
        [plain], _ = await answer(c, stream)
    assert plain["tokens"] == []
    assert fake.requests[0].sampling.logprobs == 2 and fake.requests[1].sampling.logprobs is None
    assert b"".join(bytes(token["bytes"]) for token in choice["tokens"]) == "é<|close|>response<|sep|>".encode()
    top = choice["tokens"][2]["top_logprobs"]
    assert [(entry["token"], entry["logprob"]) for entry in top] == [("<|close|>", -0.5), ("<|sep|>", -9999.0)]


@BOTH
@pytest.mark.parametrize("stop", [["\nUser:"], "\nUser:"])
async def test_a_stop_string_frees_the_engine(fake, stream, stop):
    fake.script, fake.step = (lambda request: "Hi\nUser: more and more"), 2
    async with client(fake) as c:
        [choice], usage = await answer(c, stream, stop=stop, thinking={"type": "disabled"})
    assert (choice["content"], choice["finish_reason"], choice["matched_stop"]) == ("Hi", "stop", "\nUser:")
    assert usage["completion_tokens"] == 8
    assert (fake.closed, fake.running) == (1, 0)


@BOTH
async def test_ignore_eos_runs_to_the_limit(fake, tok, stream):
    text = "a<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>rest of it"
    fake.script, fake.end = (lambda request: text), "length"
    async with client(fake) as c:
        [choice], usage = await answer(
            c, stream, ignore_eos=True, max_tokens=24, stop_token_ids=[5], thinking={"type": "disabled"}
        )
    assert (choice["content"], choice["finish_reason"], usage["completion_tokens"]) == ("a", "length", 24)
    assert fake.requests[0].sampling.stop_ids == (5,)


@BOTH
async def test_an_answer_that_was_taken_for_reasoning(fake, stream):
    """A bare end of the response inside the think channel: the text was the answer."""
    fake.script = lambda request: "It is 12.<|close|>response<|sep|><|close|>message<|sep|>"
    async with client(fake) as c:
        [choice], _ = await answer(c, stream)
    assert choice["content"] == "It is 12."
    assert choice["reasoning_content"] == ("It is 12." if stream else "")  # what was sent is not taken back


@BOTH
async def test_an_aborted_sequence_says_so(fake, stream):
    fake.script, fake.end = (lambda request: "abc"), "abort"
    async with client(fake) as c:
        [choice], _ = await answer(c, stream, thinking={"type": "disabled"})
    assert (choice["content"], choice["finish_reason"]) == ("abc", "abort")


@BOTH
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("prompt does not fit"), 400),
        (Unavailable("the queue is full"), 503),
        (RuntimeError("secret inside"), 500),
    ],
)
async def test_errors_before_the_first_token_are_statuses(fake, stream, error, status):
    fake.error = error
    async with client(fake) as c:
        response = await chat(c, stream=stream)
        assert c.service.active == 0
    body = response.json()
    assert response.status_code == status
    assert {key: body[key] for key in body["error"]} == body["error"] and body["object"] == "error"
    assert (body["message"] == str(error)) == (status != 500)
    assert "secret" not in response.text


async def test_an_error_inside_a_stream_is_its_last_event(fake):
    fake.script, fake.fails_after = (lambda request: TURN), 9
    async with client(fake) as c:
        *chunks, last = events(await chat(c, stream=True))
        assert (await chat(c)).status_code == 500
        assert c.service.active == 0
    assert "".join(chunk["choices"][0]["delta"]["reasoning_content"] or "" for chunk in chunks) == "Plan."
    assert last["error"]["type"] == "server_error" and "secret" not in str(last)


async def test_an_engine_that_breaks_off_is_an_error(fake):
    fake.script, fake.end = (lambda request: "abc"), None
    async with client(fake) as c:
        assert (await chat(c)).status_code == 500


async def test_keep_alive_comments(fake):
    fake.script, fake.pause, fake.step = (lambda request: "abcdef"), 0.05, 1
    async with client(fake, keep_alive=0.02) as c:
        response = await chat(c, stream=True, thinking={"type": "disabled"})
    assert ": keep-alive\n\n" in response.text
    assert assemble(events(response))[0][0]["content"] == "abcdef"
