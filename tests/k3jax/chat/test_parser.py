"""Public reports, random valid turns, broken ones, and garbage; each must not depend on how the output is cut."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.chat.deltas import CallArguments, CallStart, Content, Finish, Message, Reasoning, Relabel, ToolCall, join
from k3jax.chat.encoding import render
from k3jax.chat.parser import Parser, parse
from tests.conftest import DATA
from tests.k3jax.chat.outputs import FORGED, NAMES, PLAIN, cut, expected, output, run, tokens, turns

CASES = [json.loads(line) for line in (DATA / "cases" / "parser_streams.jsonl").read_text().splitlines()]


def decoded(message):
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
    return {
        "reasoning_content": message.reasoning,
        "content": message.content,
        "tool_calls": calls,
        "finish_reason": message.finish_reason,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_reports(case):
    text = "".join(case["chunks"])
    options = case["thinking"], case.get("stop", ())
    splits = [case["chunks"], text, tokens(text), *([text[:cut], text[cut:]] for cut in range(len(text) + 1))]
    for pieces in splits:
        deltas = run(pieces, *options, case["engine_finish"])
        assert decoded(join(deltas)) == case["expect"]
        for delta in deltas:
            assert getattr(delta, "text", "x").encode()
    assert decoded(parse(text, *options, case["engine_finish"])) == case["expect"]
    if case["id"] != "PS-11":
        assert decoded(join(run(text, *options, case["engine_finish"], stream_calls=True))) == case["expect"]


def test_a_streamed_call_that_is_cut_stays_half_sent():
    """PS-11 wants no half call, spec serving 8.4 streamed arguments, which cannot know: so the caller chooses."""
    text = "".join(next(case for case in CASES if case["id"] == "PS-11")["chunks"])
    message = join(run(text, True, reason="length", stream_calls=True))
    assert message == Message(".", "Checking.", [ToolCall("f", '{"x": "abc')], "length")


@given(turn=turns(PLAIN), data=st.data(), stream_calls=st.booleans())
def test_valid_turns_cut_at_random(turn, data, stream_calls):
    text = "".join(piece for piece, _ in output(*turn))
    assert parse(text, True) == expected(*turn)
    assert join(run(cut(text, data), True, stream_calls=stream_calls)) == expected(*turn)
    assert join(run(text, True, stream_calls=stream_calls)) == expected(*turn)


@given(turn=turns(PLAIN | FORGED), data=st.data(), stream_calls=st.booleans())
def test_ordinary_text_never_forges_structure(turn, data, stream_calls):
    pieces = []
    for piece, control in output(*turn):
        pieces += [(piece, True)] if control else [(part, False) for part in cut(piece, data)]
    assert join(run(pieces, True, stream_calls=stream_calls)) == expected(*turn)


@pytest.mark.parametrize("thinking", [True, False])
def test_reads_what_the_encoder_writes(thinking):
    arguments = {"city": 'a "b" & <|sep|>', "days": [1, 2.5, None], "é": {"ok": True}, "none": ""}
    function = {"name": "get<|open|>weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    turn = {"role": "assistant", "reasoning_content": "why", "content": "see", "tool_calls": [call, call]}
    prompt = render([{"role": "user", "content": "q"}], thinking=thinking)
    segments = render([{"role": "user", "content": "q"}, turn], thinking=thinking, add_generation_prompt=False)
    assert segments[: len(prompt)] == prompt
    calls = [(function["name"], arguments)] * 2
    assert join(run(segments[len(prompt) :], thinking)) == expected("why" if thinking else "", "see", calls)


# What is sent when.


def test_text_is_sent_at_once_and_only_what_may_be_a_name_waits():
    parser = Parser(thinking=True, stop=["ending"])
    assert parser.feed("plan <|") == [Reasoning("plan ")]
    assert parser.feed("x") == [Reasoning("<|x")]
    assert parser.feed("<|close|>thi") == []
    assert parser.feed("nk<|sep|><|open|>response<|sep|>the e") == [Content("the ")]
    assert parser.feed("n") == []
    assert parser.feed("try") == [Content("entry")]
    assert parser.feed("<|") == []
    assert parser.feed("open|>", control=False) == [Content("<|open|>")]
    assert parser.feed(" and<|", control=None) == [Content(" and")]
    assert parser.feed("<|close|>", control=True) == [Content("<|")]
    assert parser.feed("message") == parser.feed("<|sep|>", control=True) == []
    assert parser.ended
    assert parser.feed("more") == []
    assert parser.finish() == [Finish("stop", None)]


def test_arguments_are_streamed_once_their_type_is_known():
    parser = Parser(thinking=False, stream_calls=True)
    assert parser.feed('<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>') == [CallStart(0, "f")]
    assert parser.feed('<|open|>argument key="a" type="string"<|sep|>') == [CallArguments(0, '{"a": "')]
    assert parser.feed('one "two') == [CallArguments(0, 'one \\"two')]
    assert parser.feed('<|close|>argument<|sep|><|open|>argument key="b" type="number"<|sep|>1') == [
        CallArguments(0, '", "b": ')
    ]
    assert parser.feed("2") == []
    assert parser.feed("<|close|>argument<|sep|><|close|>call<|sep|>") == [CallArguments(0, "12}")]


def test_a_whole_call_is_one_start_and_one_text():
    text = "".join(piece for piece, _ in output("", "", [("f", {"a": "b"}), ("g", {})]))
    calls = [CallStart(0, "f"), CallArguments(0, '{"a": "b"}'), CallStart(1, "g"), CallArguments(1, "{}")]
    assert run(text, True) == [*calls, Finish("tool_calls", None)]


def test_the_stop_string_ends_the_turn():
    parser = Parser(False, "three")
    assert parser.feed("one th") == [Content("one ")]
    assert parser.feed("ree<|close|>response<|sep|> four") == []
    assert parser.ended
    assert parser.finish("length") == [Finish("stop", "three")]


def test_a_tool_call_divides_the_content_for_stop_strings():
    text = expand("one th{/response}{tools}{F}{/F}{/tools}{response}ree")
    assert run([text], False, "three") == [
        *(Content("one "), Content("th")),
        *(CallStart(0, "f"), CallArguments(0, "{}")),
        *(Content("ree"), Finish("tool_calls", None)),
    ]
    assert join(run(expand("one th{/response}{response}ree"), False, "three")).content == "one "


# What models get wrong, written short: `{tag}` opens, `{/tag}` closes; F is a call of f, X its string argument x.

SHORT = {"F": 'call tool="f" index="1"', "X": 'argument key="x" type="string"'}


def expand(short):
    text = re.sub(r"\{/([^}]*)\}", lambda tag: f"<|close|>{SHORT.get(tag[1], tag[1]).split(' ')[0]}<|sep|>", short)
    return re.sub(r"\{(\w[^}]*)\}", lambda tag: f"<|open|>{SHORT.get(tag[1], tag[1])}<|sep|>", text)


ONE, NONE = ToolCall("f", '{"x": "1"}'), ToolCall("f", "{}")
BROKEN = {  # output, reasoning, content, calls
    "think skipped": ("{response}a{/response}{/message}", "", "a"),
    "think opened again": ("{think}r{/think}{response}a", "r", "a"),
    "think empty, response never opened": ("{/think}a{/response}{/message}", "", "a"),
    "response never opened": ("r{/think}a", "r", "a"),
    "response opened twice": ("{/think}{response}a{response}b", "", "ab"),
    "answer in think": ("a{/response}{/message}", "", "a"),
    "answer in think opened again": ("{think}a{/response}{/message}", "", "a"),
    "reasoning alone": ("r{/message}", "r", ""),
    "think after a response": ("{response}a{/response}{think}r{/response}{/think}b", "r", "ab"),
    "text after channels": ("{/think}{response}a{/response}x{tools}y{/tools}z{/message}", "", "a"),
    "text after the turn": ("r{/message}x{response}y", "r", ""),
    "unknown tags": ("r{plan}s{/plan}{/think}{response}a{b x=1}c{/b}{/response}{note}d", "rs", "ac"),
    "tags closed that are not open": ("r{/tools}{/call}{/argument}{/json}s{/think}{/think}a", "rs", "a"),
    "think closed again": ("{/think}{response}a{/response}{/think}b{tools}{F}{X}1{/think}{/X}{/F}", "", "a", ONE),
    "stray sep": ("r<|sep|>s", "rs", ""),
    "tag in a tag": ("r<|close|>th<|open|>response<|sep|>a", "r", "a"),
    "empty tag": ("r<|open|><|sep|>s", "rs", ""),
    "turn ends in a tag": ("r<|close|>th<|end_of_msg|>x", "r", ""),
    "two sections": ("{tools}{F}{X}1{/X}{/F}{/tools}{response}a{tools}{F}{/F}{/tools}", "", "a", ONE, NONE),
    "call outside tools": ("{/think}a{F}{X}1{/X}{/F}", "", "a", ONE),
    "argument outside a call": ("{/think}a{X}1{/X}", "", "a"),
    "call without a name": ('{tools}{call index="1"}{X}1{/X}{/call}{F}{/F}', "", "", NONE),
    "name without quotes": ("{tools}{call tool=f}{/call}", "", ""),
    "argument without a key": ('{tools}{F}{argument type="string"}2{/argument}{/F}', "", "", NONE),
    "argument without a type": ('{tools}{F}{argument key="x"}"1"{/argument}{/F}', "", "", ONE),
    "equal keys": ("{tools}{F}{X}1{/X}{X}2{/X}{/F}", "", "", ONE),
    "text between tags": ("{tools}t{F}u{X}1{/X}v{/F}w", "", "", ONE),
    "tag in a value": ("{tools}{F}{X}{b}1{/b}{/X}{/F}", "", "", ONE),
    "value open in a call": ("{tools}{F}{X}1{/F}", "", "", ONE),
    "value open before another": ('{tools}{F}{X}1{argument key="y"}2{/F}', "", "", ToolCall("f", '{"x": "1", "y": 2}')),
    "call open before another": ("{tools}{F}{X}1{F}{/F}", "", "", ONE, NONE),
    "call open in tools": ("{tools}{F}{X}1{/tools}", "", "", ONE),
    "call open in the turn": ("{tools}{F}{X}1{/message}", "", "", ONE),
    "call cut": ("{tools}{F}{/F}{F}{X}1", "", "", NONE),
    "json": ('{tools}{F}{json type="object"}{"x":"1"}{/json}{/F}', "", "", ONE),
    "json that does not parse": ("{tools}{F}{json}x=1{/json}{X}2{/X}{/F}", "", "", ToolCall("f", "x=1")),
    "json that is blank": ("{tools}{F}{json} {/json}{X}1{/X}{/F}", "", "", ONE),
    "json after an argument": ("{tools}{F}{X}1{/X}{json}2{/json}{/F}", "", "", ONE),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_turns(name):
    short, reasoning, content, *calls = BROKEN[name]
    message = Message(reasoning, content, calls, "tool_calls" if calls else "stop")
    text = expand(short)
    assert parse(text, True) == message
    assert join(run(text, True)) == message
    assert join(run(tokens(text), True)) == message
    if name != "call cut":
        assert join(run(text, True, stream_calls=True)) == message


@pytest.mark.parametrize(
    "value", ["NaN", "[-Infinity]", "1e999", '{"a": "\\ud800"}', "9" * 5000, "[" * 200_000, "1 2", ""]
)
def test_values_that_cannot_be_sent_as_json_stay_text(value):
    text = expand('{tools}{F}{argument key="x" type="object"}') + value + expand("{/argument}{/F}")
    assert json.loads(parse(text, True).tool_calls[0].arguments) == {"x": value}


def test_an_answer_in_the_think_channel_is_sent_again_as_content():
    """The rule that nothing is sent twice gives way to spec serving 8.6: the client must get the answer as content."""
    parser = Parser(thinking=True, stop=["x"])
    assert parser.feed("an ax") == [Reasoning("an ax")]
    assert parser.feed("<|close|>response<|sep|>") == [Relabel(), Content("an a")]
    assert parser.finish() == [Finish("stop", "x")]


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_cut_output_loses_its_partial_marker(reason):
    for end in range(1, len("<|close|>response<|sep|>")):
        text = "a" + "<|close|>response<|sep|>"[:end]
        assert parse(text, False, finish_reason=reason) == Message("", "a", [], reason)
    assert join(run([("a<|clo", False)], False, reason=reason)).content == "a<|clo"  # known to be ordinary


def test_a_call_before_the_token_limit_keeps_the_reason():
    text = expand("{tools}{F}{/F}{F}")
    assert parse(text, True, finish_reason="length") == Message("", "", [NONE], "length")


def test_other_specials_vanish():
    pieces = [("a", False), ("[PAD]", True), ("<|", False), ("<|close|>", True), ("[PAD]", True), ("response", False)]
    assert join(run([*pieces, ("<|sep|>", True), ("b", False)], False)).content == "a<|"


# Garbage.

FRAGMENTS = st.sampled_from(
    [
        *NAMES, "<|open|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>", "<|close|>think<|sep|>", "<|close|>call<|sep|>", "<|close|>argument<|sep|>",
        '<|open|>call tool="f"<|sep|>', '<|open|>argument key="k" type="string"<|sep|>', "<|open|>json<|sep|>",
        '<|open|>argument key="j" type="number"<|sep|>', "<|close|>json<|sep|>", "<|close|>message<|sep|>",
        "<|op", "<", "a", "b", "{}", ' tool="', "call", "é", "\n",
    ]
)  # fmt: skip


@given(
    text=st.lists(FRAGMENTS, max_size=20).map("".join),
    thinking=st.booleans(),
    stop=st.lists(st.sampled_from(["a", "ab", "ba", "<b", "é\n"]), max_size=3),
    reason=st.sampled_from(["stop", "length", "abort"]),
    stream_calls=st.booleans(),
    data=st.data(),
)
def test_garbage_never_raises_nor_depends_on_the_cuts(text, thinking, stop, reason, stream_calls, data):
    options = thinking, stop, reason, stream_calls
    whole = run([text], *options)
    assert join(run(text, *options)) == join(run(cut(text, data), *options)) == join(whole)
    if not stream_calls:
        assert parse(text, thinking, stop, reason) == join(whole)
    message = join(run(tokens(text), *options))
    assert message == join(whole) or reason != "stop"  # there a partial name is known to be text
    visible = [message.reasoning, message.content, *(call.arguments for call in message.tool_calls)]
    assert not any(name in part for name in NAMES for part in visible)
    assert isinstance(whole[-1], Finish) and not any(isinstance(delta, Finish) for delta in whole[:-1])


@pytest.mark.parametrize("stream_calls", [False, True])
def test_long_output_in_single_characters(stream_calls):
    """Work that grew with the square of the length would take minutes."""
    reasoning, content, value = "think < " * 15_000, "ab" * 60_000, '"<|\n' * 30_000
    turn = reasoning, content, [("f", {"x": value})]
    text = "".join(piece for piece, _ in output(*turn))
    assert join(run(text, True, ["ab" * 100 + "c"], stream_calls=stream_calls)) == expected(*turn)
