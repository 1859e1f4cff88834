"""A checkpoint with a chat template of its own: plain text out, no channels and no tool calls."""

import json

import pytest

from k3jax.chat.tokenizer import Tokenizer
from tests.k3jax.chat.folders import K2_SPECIALS, write_folder
from tests.serve.http.fake import Fake, answer, chat, client

pytestmark = pytest.mark.anyio
STREAMS = pytest.mark.parametrize("stream", [False, True])
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}<|im_assistant|>"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("k2") / "model", specials=K2_SPECIALS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


@STREAMS
async def test_text_is_content(tok, stream):
    fake = Fake(tok, script=lambda request: tok.encode("a<|close|>b"))
    async with client(fake) as c:
        [choice], usage = await answer(c, stream)
    assert (choice["content"], choice["reasoning_content"], choice["finish_reason"]) == ("a<|close|>b", "", "stop")
    prompt = list(fake.requests[0].prompt)
    assert prompt == [
        tok.special["<|im_user|>"],
        *tok.encode("Hi"),
        tok.special["<|im_end|>"],
        tok.special["<|im_assistant|>"],
    ]
    assert usage["prompt_tokens"] == len(prompt) and usage["reasoning_tokens"] == 0
    assert set(fake.requests[0].sampling.stop_ids) == set(tok.stop_ids)


@STREAMS
async def test_constrained_text(tok, stream):
    async with client(Fake(tok)) as c:
        [choice], _ = await answer(c, stream, response_format={"type": "json_object"})
        assert isinstance(json.loads(choice["content"]), dict)
        [choice], _ = await answer(c, stream, regex="[ab]{3}")
        assert len(choice["content"]) == 3 and set(choice["content"]) <= set("ab")


async def test_calls_cannot_be_forced(tok):
    fake = Fake(tok, script=lambda request: tok.encode("ok"))
    async with client(fake) as c:
        assert (await chat(c, tools=TOOLS, tool_choice="required")).status_code == 400
        for choice in ("auto", "none"):
            [got], _ = await answer(c, False, tools=TOOLS, tool_choice=choice)
            assert got["content"] == "ok"
