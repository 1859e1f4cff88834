"""Rows of the vendor verifier's contract that need no trained model (spec serving 10.1 to 10.4), in both stream modes.

Where an answer has to obey a grammar, the scripted engine walks through it at random.
"""

import json

import jsonschema
import pytest

from tests.serve.http.fake import answer, chat, client, ids_of

pytestmark = pytest.mark.anyio
STREAMS = pytest.mark.parametrize("stream", [False, True])
NAMES = ["get_weather", "search", "_x-1"]
LOOP = 'x<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="{}" index="1"<|sep|><|close|>call<|sep|>'


def tool(name="get_weather", **function):
    return {"type": "function", "function": {"name": name, **function}}


def system(*tools, content=""):
    return {"role": "system", "content": content, "tools": list(tools)}


USER = {"role": "user", "content": "Weather in Oslo?"}


def thinking_fields(on):
    yield {"thinking": {"type": "enabled" if on else "disabled"}}
    yield {"chat_template_kwargs": {"thinking": on}}


ACCEPTED = [
    (on, {**fields, **how})
    for on in (False, True)
    for how in thinking_fields(on)
    for fields in (
        {},
        {"temperature": 0.6},
        {"top_p": 0.95},
        {"presence_penalty": 0},
        {"frequency_penalty": 0},
        {"n": 1},
        {"max_tokens": 32768},
        *([{"temperature": 0.0}, {"temperature": 1.0}] if on else ()),
    )
]
REFUSED = [
    {**fields, **how}
    for on in (False, True)
    for how in thinking_fields(on)
    for fields in (
        {"temperature": 1.1},
        {"temperature": 2.0},
        {"temperature": -0.1},
        {"top_p": 0.8},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"n": 2},
    )
]


@STREAMS
@pytest.mark.parametrize(("on", "fields"), ACCEPTED)
async def test_parameters_that_k3_takes(fake, tok, stream, on, fields):
    fake.script = lambda request: "Hi.<|close|>think<|sep|><|open|>response<|sep|>Hi." if on else "Hi."
    async with client(fake, strict_k3_params=True) as c:
        [choice], _ = await answer(c, stream, **fields)
    assert choice["content"] == "Hi." and choice["finish_reason"] == "stop"
    [request] = fake.requests
    opened = ids_of(tok, "<|open|>think<|sep|>" if on else "<|open|>response<|sep|>")
    assert list(request.prompt[-len(opened) :]) == opened
    assert request.sampling.top_p == 0.95 and request.sampling.temperature == fields.get("temperature", 1.0)


@STREAMS
@pytest.mark.parametrize("fields", REFUSED)
async def test_parameters_that_k3_does_not_take(fake, stream, fields):
    async with client(fake, strict_k3_params=True) as c:
        response = await chat(c, stream=stream, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in fields
    assert fake.requests == []


@pytest.mark.parametrize("fields", [f for f in REFUSED if f.get("temperature") != -0.1])
async def test_general_clients_may_send_them(fake, fields):
    async with client(fake) as c:
        assert (await chat(c, **fields)).status_code == 200


FIRST, SECOND, THIRD = (tool(name) for name in NAMES)
NESTED = tool(
    parameters={
        "type": "object",
        "properties": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
        "required": ["place"],
    }
)
DYNAMIC = [
    [system(FIRST), USER],
    [system(content="Be kind.") | {"tools": None}, system(FIRST), USER],
    [USER, system(FIRST)],
    [system(FIRST, SECOND, THIRD), USER],
    [system(FIRST), system(SECOND), USER],
    [system(NESTED), USER],
    [system(tool(strict=False)), USER],
    [{**system(FIRST), "content": None}, USER],
    [{**system(FIRST), "role": "developer"}, USER],
]


@STREAMS
@pytest.mark.parametrize("messages", DYNAMIC)
@pytest.mark.parametrize("tools", [None, [tool("lookup")]])
async def test_dynamic_tools_have_to_be_called(fake, stream, messages, tools):
    declared = [t for m in messages for t in m.get("tools") or ()] + (tools or [])
    async with client(fake, strict_k3_params=True) as c:
        [choice], _ = await answer(c, stream, messages=messages, tools=tools, tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    call = choice["calls"][0]
    [schema] = [t["function"].get("parameters", {}) for t in declared if t["function"]["name"] == call["name"]]
    jsonschema.validate(json.loads(call["arguments"]), schema, cls=jsonschema.Draft202012Validator)
    assert call["id"] == f"{call['name']}:0"


BAD_NAMES = ["1bad_name", "bad@name", "", "a" * 257, "a\n", "a b"]
BAD_DYNAMIC = [
    [{"role": "user", "content": "q", "tools": [FIRST]}],
    [USER, {"role": "assistant", "content": "a", "tools": [FIRST]}, USER],
    [system(FIRST, content="Be kind."), USER],
    [system({"function": FIRST["function"]}), USER],
    [system({"type": "function"}), USER],
    [system({"type": "function", "function": {"description": "d"}}), USER],
    *[[system(tool(name)), USER] for name in BAD_NAMES],
    [system({**FIRST, "type": "bogus"}), USER],
    [system(FIRST, {**SECOND, "type": "bogus"}), USER],
    [{"role": "system", "content": "", "tools": {"get_weather": FIRST}}, USER],
    [system(FIRST, None), USER],
    [system(FIRST, FIRST), USER],
    [system(FIRST), system(FIRST), USER],
    [USER, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "r"}],
    [{"role": "function", "content": "r"}],
    [],
]


@STREAMS
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("messages", BAD_DYNAMIC)
async def test_bad_dynamic_tools(fake, stream, choice, messages):
    async with client(fake, strict_k3_params=True) as c:
        response = await chat(c, messages=messages, tools=[tool("lookup")], tool_choice=choice, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"]
    assert fake.requests == []


@STREAMS
@pytest.mark.parametrize(
    "tools",
    [
        [{"function": FIRST["function"]}],
        [{"type": "function"}],
        [{"type": "function", "function": {}}],
        *[[tool(name)] for name in BAD_NAMES],
        [{**FIRST, "type": "bogus"}],
        {"get_weather": FIRST},
        [FIRST, None],
        [FIRST, FIRST],
        [tool("dynamic")],
    ],
)
async def test_bad_tools_of_the_request(fake, stream, tools):
    messages = [system(tool("dynamic")), USER]
    async with client(fake, strict_k3_params=True) as c:
        assert (await chat(c, messages=messages, tools=tools, stream=stream)).status_code == 400


@STREAMS
async def test_tool_choice_auto(fake, stream):
    fake.script = lambda request: LOOP.format("get_weather") + "<|close|>tools<|sep|><|close|>message<|sep|>"
    async with client(fake, strict_k3_params=True) as c:
        [called], _ = await answer(c, stream, tools=[FIRST], tool_choice="auto")
        fake.script = lambda request: "x<|close|>think<|sep|><|open|>response<|sep|>No tools.<|close|>response<|sep|>"
        [spoken], _ = await answer(c, stream, tools=[FIRST], tool_choice="auto")
    assert called["finish_reason"] == "tool_calls" and called["calls"][0]["name"] == "get_weather"
    assert (spoken["finish_reason"], spoken["calls"], spoken["content"]) == ("stop", {}, "No tools.")


@STREAMS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
@pytest.mark.parametrize("on", [True, False])
async def test_tool_choice_that_forces_a_call(fake, stream, choice, on):
    async with client(fake, strict_k3_params=True) as c:
        thinking = {"type": "enabled" if on else "disabled"}
        [got], _ = await answer(c, stream, tools=[FIRST, SECOND], tool_choice=choice, thinking=thinking)
    assert got["finish_reason"] == "tool_calls"
    called = {call["name"] for call in got["calls"].values()}
    assert called and called <= ({"search", "get_weather"} if choice == "required" else {"search"})


@STREAMS
async def test_one_call_without_parallel_calls(fake, stream):
    async with client(fake) as c:
        for seed in range(5):
            [got], _ = await answer(
                c, stream, tools=[FIRST, SECOND], tool_choice="required", parallel_tool_calls=False, seed=seed
            )
            assert len(got["calls"]) == 1


@STREAMS
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "bogus", "tools": [FIRST]},
        {"tool_choice": {"type": "function", "function": {"name": "unknown"}}, "tools": [FIRST]},
        {"tool_choice": {"type": "bogus", "function": {"name": "get_weather"}}, "tools": [FIRST]},
    ],
)
async def test_bad_tool_choice(fake, stream, fields):
    async with client(fake, strict_k3_params=True) as c:
        response = await chat(c, stream=stream, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("tool_choice")


@STREAMS
@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_tool_choice_without_tools(fake, stream, choice):
    async with client(fake, strict_k3_params=True) as c:
        [got], _ = await answer(c, stream, tool_choice=choice)
    assert (got["finish_reason"], got["calls"], got["content"]) == ("stop", {}, "Hi.")


@STREAMS
@pytest.mark.parametrize("seed", range(3))
async def test_tool_choice_none_with_tools(fake, stream, seed):
    async with client(fake, strict_k3_params=True) as c:
        [got], _ = await answer(c, stream, tools=[FIRST], tool_choice="none", seed=seed)
    assert (got["finish_reason"], got["calls"]) == ("stop", {})


SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["capital", "people"],
}


def json_format(**fields):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}


@STREAMS
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(
    "response_format", [{"type": "json_object"}, json_format(strict=True), json_format(strict=False), json_format()]
)
@pytest.mark.parametrize("tools", [None, [FIRST]])
async def test_structured_output(fake, stream, on, response_format, tools):
    thinking = {"type": "enabled" if on else "disabled"}
    async with client(fake, strict_k3_params=True) as c:
        for seed in range(4):
            [got], _ = await answer(
                c, stream, response_format=response_format, thinking=thinking, seed=seed, tools=tools
            )
            if got["calls"]:
                assert tools and got["finish_reason"] == "tool_calls"
                continue
            assert got["finish_reason"] == "stop"
            assert not set("\n\t") & set(got["content"])
            value = json.loads(got["content"])
            assert isinstance(value, dict)
            assert json.dumps(value, separators=(",", ":"), ensure_ascii=False).count(" ") == got["content"].count(" ")
            if response_format["type"] == "json_schema":
                jsonschema.validate(value, SCHEMA)
                assert set(value) == set(SCHEMA["properties"]) or not response_format["json_schema"].get("strict")


@STREAMS
async def test_text_format_constrains_nothing(fake, stream):
    async with client(fake, strict_k3_params=True) as c:
        [got], _ = await answer(c, stream, response_format={"type": "text"})
    assert (got["finish_reason"], got["content"], fake.requests[0].grammar) == ("stop", "Hi.", None)


@STREAMS
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "bogus"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "answer"}},
        json_format(strict="yes"),
        json_format(strict=1),
        json_format(schema=[SCHEMA]),
        json_format(schema="object"),
        json_format(schema={"type": "nonsense"}),
    ],
)
async def test_bad_response_format(fake, stream, response_format):
    async with client(fake, strict_k3_params=True) as c:
        response = await chat(c, stream=stream, response_format=response_format)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("response_format")


async def test_prompt_tokens_leave_the_opened_channel_out(fake, tok):
    """The schema is part of the prompt; a disabled think channel leaves the effort out."""
    plain = ids_of(tok, '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>')
    plain += ids_of(tok, '<|open|>message role="assistant"<|sep|>')
    async with client(fake, strict_k3_params=True) as c:
        off = {"thinking": {"type": "disabled"}}
        _, usage = await answer(c, False, **off)
        _, streamed = await answer(c, True, **off)
        _, with_schema = await answer(c, False, response_format=json_format(), **off)
    assert usage["prompt_tokens"] == streamed["prompt_tokens"] == len(plain)
    assert with_schema["prompt_tokens"] > len(plain) + len(json.dumps(SCHEMA, separators=(",", ":")))
