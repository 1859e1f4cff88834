"""Outputs of a model in thinking mode, written from the format's description, and a parser fed with them in pieces."""

import json
import re
from itertools import pairwise

from hypothesis import strategies as st

from k3jax.chat.deltas import Message, ToolCall
from k3jax.chat.parser import Parser

NAMES = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def run(pieces, thinking, stop=(), reason="stop", stream_calls=False):
    """Deltas for pieces: strings, or (text, is it a control token)."""
    parser = Parser(thinking, stop, stream_calls)
    fed = [parser.feed(piece) if isinstance(piece, str) else parser.feed(*piece) for piece in pieces]
    return [delta for deltas in [*fed, parser.finish(reason)] for delta in deltas]


def tokens(text):
    """Control tokens told from ordinary characters, as a caller with ids does."""
    pieces = re.split("(" + "|".join(map(re.escape, NAMES)) + ")", text)
    return [(part, bool(i % 2)) for i, piece in enumerate(pieces) for part in ([piece] if i % 2 else piece)]


PARTS = ("<", "<|", "|>", "<|op", "&", "&quot;", '"', "\\", "\n", " ", "é", "👍🏽", "\u2028", "\x00", "{}", "think")
PLAIN = (
    st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=6)
    .map("".join)
    .filter(lambda text: not any(name in text for name in NAMES))
)
FORGED = st.lists(st.sampled_from((*PARTS, *NAMES)), max_size=6).map("".join)


def turns(text):
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    values = st.recursive(
        scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=6
    )
    calls = st.lists(st.tuples(text.filter(bool), st.dictionaries(text, values, max_size=3)), max_size=3)
    return st.tuples(text, text, calls)


def element(tag, body, **attributes):
    """Pieces of an element: (text, is it a control token)."""
    header = tag
    for key, value in attributes.items():
        value = value.replace("&", "&amp;").replace('"', "&quot;")
        header += f' {key}="{value}"'
    opening = [("<|open|>", True), (header, False), ("<|sep|>", True)]
    return [*opening, *body, ("<|close|>", True), (tag, False), ("<|sep|>", True)]


def type_of(value):
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def output(reasoning, content, calls):
    """What a model in thinking mode emits for a turn."""
    pieces = element("think", [(reasoning, False)])[3:] + element("response", [(content, False)])
    elements = []
    for index, (name, arguments) in enumerate(calls, 1):
        body = []
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            body += element("argument", [(text, False)], key=key, type=type_of(value))
        elements += element("call", body, tool=name, index=str(index))
    pieces += element("tools", elements) if calls else []
    return [*pieces, ("<|close|>", True), ("message", False), ("<|sep|>", True), ("<|end_of_msg|>", True)]


def expected(reasoning, content, calls):
    written = [ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    return Message(reasoning, content, written, "tool_calls" if calls else "stop")


def cut(text, data):
    """The text in pieces of random length."""
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]
