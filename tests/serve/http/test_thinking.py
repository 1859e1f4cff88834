"""Thinking and effort controls (spec serving 10.5): what reaches the prompt."""

import pytest

from tests.serve.http.fake import chat, client

pytestmark = pytest.mark.anyio


async def prompt_of(fake, **body):
    async with client(fake) as c:
        response = await chat(c, **body)
        assert response.status_code == 200, response.text
    return list(fake.requests[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"thinking": {"type": "enabled", "keep": "all", "effort": "high"}}, True, "high"),
        ({"thinking": {"keep": "all"}}, True, "max"),
        ({"thinking": {"type": "enabled", "effort": "low"}, "reasoning_effort": "max"}, True, "low"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "max"}, True, "max"),
        ({"reasoning_effort": "medium"}, True, "max"),
        ({"reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True, "max"),
        ({"chat_template_kwargs": {"thinking": True, "thinking_effort": "low"}}, True, "low"),
        ({"chat_template_kwargs": {"thinking_effort": "low"}, "reasoning_effort": "high"}, True, "high"),
        ({"chat_template_kwargs": {"thinking": False, "thinking_effort": "low"}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"thinking": {"type": "disabled", "effort": "low"}}, False, None),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, True, "max"),
    ],
)
async def test_controls(fake, tok, fields, thinking, effort):
    messages = [{"role": "user", "content": "Hi"}]
    assert await prompt_of(fake, **fields) == tok.encode_chat(messages, thinking=thinking, effort=effort)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"keep": "last"}},
        {"thinking": {"effort": "medium"}},
        {"thinking": "enabled"},
        {"reasoning_effort": "bogus"},
        {"chat_template_kwargs": {"thinking": "yes"}},
    ],
)
async def test_bad_controls(fake, fields):
    async with client(fake) as c:
        assert (await chat(c, **fields)).status_code == 400


async def test_history_keeps_its_reasoning_unless_told(fake, tok):
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "reasoning_content": "because"},
        {"role": "user", "content": "q2"},
    ]
    bare = [messages[0], {"role": "assistant", "content": "a1"}, messages[2]]
    for fields, expected in [
        ({}, messages),
        ({"thinking": {"keep": "all"}}, messages),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, messages),
        ({"chat_template_kwargs": {"preserve_thinking": False}}, bare),
    ]:
        assert await prompt_of(fake, messages=messages, **fields) == tok.encode_chat(expected, effort="max")


async def test_the_whole_request_reaches_the_encoder(fake, tok):
    """Unknown keys of tools are kept, developer is system, parts are text, tool choice and format are rendered."""
    tool = {"type": "function", "function": {"name": "f", "x-note": 1, "parameters": {"b": 1, "a": [None]}}, "y": 2}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
    ]
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "ab", "name": "Ann"}]
    for given, told in [(None, None), ("auto", "auto"), ("none", "none"), ("required", "required")]:
        got = await prompt_of(
            fake, messages=messages, tools=[tool], tool_choice=given, response_format=form, max_tokens=9
        )
        assert got == tok.encode_chat(plain, [tool], True, "max", told, form)


async def test_images_are_refused(fake):
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with client(fake) as c:
        response = await chat(c, messages=[{"role": "user", "content": parts}])
    assert response.status_code == 400 and "image" in response.json()["message"]
