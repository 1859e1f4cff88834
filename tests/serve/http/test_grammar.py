"""Grammars: random walks through them give outputs whose parts fit their schemas, which another library judges."""

import json
import logging

import jsonschema
import numpy as np
import pytest

from k3jax.chat.deltas import join
from k3jax.chat.reader import OutputReader
from serve.http.grammar import ANY_OBJECT, Grammars, grammar_body, regex_body, schema_body, source
from serve.http.schema_types import closed
from serve.http.turn_grammar import Turn, turn_source
from tests.serve.http.fake import VOCAB, ids_of
from tests.serve.http.walker import walk


@pytest.fixture(scope="module")
def grammars(tok):
    return Grammars(tok, VOCAB)


def obj(properties, required=None, **more):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, **more}


NODE = obj({"c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}, additionalProperties=False)
STRICT = {
    "optional": obj({"city": {"type": "string"}, "days": {"type": "integer", "minimum": -3, "maximum": 5}}, ["city"]),
    "union": obj(
        {"u": {"anyOf": [{"type": "string", "enum": ['a"b', "c&/d"]}, {"type": "null"}, {"type": "integer"}]}}
    ),
    "one of": obj({"u": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "array", "maxItems": 1}]}}),
    "type list": obj({"u": {"type": ["string", "null", "boolean"]}}),
    "definitions": obj({"value": {"$ref": "#/$defs/n"}}, additionalProperties=False, **{"$defs": {"n": NODE}}),
    "root reference": obj({"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "reference into properties": obj({"a": {"type": "boolean"}, "b": {"$ref": "#/properties/a"}}),
    "referenced string": obj({"s": {"$ref": "#/$defs/s"}}, **{"$defs": {"s": {"type": "string", "maxLength": 3}}}),
    "referenced arguments": {
        "$ref": "#/$defs/a",
        "$defs": {"a": obj({"x": {"type": "null"}}, additionalProperties=False)},
    },
    "pattern": obj({"p": {"type": "string", "pattern": "^[a-c]{2}/\\d$"}, "q": {"type": "string", "pattern": "x|y"}}),
    "anchored alternatives": obj({"p": {"type": "string", "pattern": "^(a|b)$|^c$"}}),
    "lengths": obj({"l": {"type": "string", "minLength": 2, "maxLength": 4}}),
    "formats": obj({f: {"type": "string", "format": f} for f in ("date", "date-time", "email", "ipv4", "uuid")}),
    "format beyond raw strings": obj({"d": {"type": "string", "format": "uri"}}),
    "any object": {"type": "object"},
    "typed keys": obj({"a": {"type": "integer"}}, [], additionalProperties={"type": "boolean"}),
    "alternative arguments": {
        "anyOf": [obj({k: {"type": t}}, additionalProperties=False) for k, t in (("a", "integer"), ("b", "null"))]
    },
    "mixed enum": obj({"e": {"enum": ["a", "", 1, None, True, [1], {"x": 2}]}}),
    "constant": obj({"e": {"const": "x\n/y"}}),
    "all of": obj({"e": {"allOf": [{"type": "string"}, {"minLength": 3, "maxLength": 9}]}}),
    "odd key": obj({'a&"b <x>': {"type": "boolean"}}),
    "numbers": obj({"n": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, "i": {"type": "integer"}}),
    "nested": obj({"o": obj({"a": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 3}})}),
    "no arguments": obj({}),
    "anything": obj({"x": {}, "y": True}),
    "required but unnamed": {"type": "object", "required": ["z"]},
}


def call(tok, grammars, function, seed, thinking=True):
    turn = Turn(thinking, functions=[function], calls="required", parallel=False)
    matcher = grammars.compile(turn_source(turn, tok, grammars.error))
    ids = walk(tok, matcher, seed)
    reader = OutputReader(tok, thinking)
    message = join([*reader.feed(ids), *reader.finish("stop")])
    assert message.finish_reason == "tool_calls"
    [made] = message.tool_calls
    assert made.name == function["name"]
    return json.loads(made.arguments)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", STRICT)
def test_arguments_fit_their_schema(tok, grammars, name, thinking, caplog):
    schema = STRICT[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for seed in range(4):
        judge.validate(call(tok, grammars, {"name": "f", "parameters": schema}, seed, thinking))
    assert not caplog.records


@pytest.mark.parametrize(
    "schema",
    [
        obj({"d": {"type": "string", "pattern": "^(?=a)b"}, "n": {"type": "integer"}}),
        obj({"d": {"type": "array", "uniqueItems": True}, "n": {"type": "integer"}}),
        obj({"n": {"type": "integer", "not": {"const": 3}}}),
    ],
)
def test_what_is_beyond_the_compiler_is_left_out(tok, grammars, schema, caplog):
    arguments = call(tok, grammars, {"name": "f", "parameters": schema}, 1)
    assert isinstance(arguments["n"], int)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "f" in record.message


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, obj({"a": {"type": 5}}), {"properties": 3}, {"type": "object", "required": 3}, {}]
)
def test_a_malformed_schema_still_gives_a_call(tok, grammars, schema):
    assert isinstance(call(tok, grammars, {"name": "f", "parameters": schema}, 0), dict)


def test_a_tool_without_parameters_has_no_arguments(tok, grammars):
    assert call(tok, grammars, {"name": "f"}, 0) == {}


def mask_of(tok, matcher, text):
    for id in ids_of(tok, text):
        assert matcher.mask()[id], tok.token_bytes(id)
        assert matcher.accept(id)
    return matcher.mask()


def test_masks_of_a_turn(tok, grammars):
    turn = Turn(True, content=schema_body(obj({"a": {"type": "integer"}}, additionalProperties=False)))
    compiled = grammars.compile(turn_source(turn, tok, grammars.error))
    start = compiled.mask()
    assert start.shape == (VOCAB,) and start.dtype == bool
    assert not start[tok.vocab_size :].any()
    assert [id for id in range(256, VOCAB) if start[id]] == [tok.special["<|close|>"]]
    inside = "hm<|close|>think<|sep|><|open|>response<|sep|>"
    assert np.flatnonzero(mask_of(tok, compiled.copy(), inside)).tolist() == tok.encode("{")
    matcher = compiled.copy()
    assert np.flatnonzero(mask_of(tok, matcher, inside + '{"a":')).size == 11  # digits and a sign
    matcher.rollback(5)
    assert np.flatnonzero(matcher.mask()).tolist() == tok.encode("{")
    assert not matcher.accept(tok.encode(" ")[0])
    assert matcher.accept(tok.encode("{")[0])
    over = mask_of(tok, compiled.copy(), inside + '{"a":12}<|close|>response<|sep|><|close|>message<|sep|>')
    assert set(np.flatnonzero(over)) == set(tok.stop_ids)
    assert (compiled.mask() == start).all()  # copies are independent


def test_the_end_of_a_grammar(tok, grammars):
    matcher = grammars.compile(source(regex_body("ab")))
    mask_of(tok, matcher, "ab")
    stop = tok.stop_ids[0]
    assert matcher.accept(stop)
    assert set(np.flatnonzero(matcher.mask())) == set(tok.stop_ids)
    assert not matcher.accept(tok.encode("a")[0])


def test_spelled_markers_are_free_text(tok, grammars):
    matcher = grammars.compile(turn_source(Turn(False), tok, grammars.error))
    text = "<|close|>response<|sep|>"
    for id in tok.encode(text):
        assert matcher.accept(id)
    assert matcher.mask()[tok.special["<|close|>"]]


@pytest.mark.parametrize("calls", ["allowed", "forbidden"])
def test_what_may_follow_the_answer(tok, grammars, calls):
    turn = Turn(True, ANY_OBJECT, [{"name": "f"}], calls)
    matcher = grammars.compile(turn_source(turn, tok, grammars.error))
    mask = mask_of(tok, matcher, "<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|>")
    allowed = {tok.special["<|close|>"]} | ({tok.special["<|open|>"]} if calls == "allowed" else set())
    assert set(np.flatnonzero(mask)) == allowed


@pytest.mark.parametrize("text", ['start: "a" /[0-9]/', 'root ::= "a" [0-9]'])
def test_grammars_of_both_syntaxes(tok, grammars, text):
    said = tok.decode(walk(tok, grammars.compile(source(grammar_body(text)))))
    assert len(said) == 2 and said[0] == "a" and said[1].isdigit()


@pytest.mark.parametrize("text", ["start: (", "root ::= (", "", "start: missing", "%%%", "start: /[z-a]/"])
def test_bad_grammars(grammars, text):
    with pytest.raises(ValueError):
        grammars.compile(source(grammar_body(text)))


@pytest.mark.parametrize("pattern", ["(unclosed", "*a", "[z-a]", "(?=a)"])
def test_bad_patterns_are_named_in_one_line(grammars, pattern):
    with pytest.raises(ValueError) as error:
        grammars.compile(source(regex_body(pattern)))
    assert "error" in str(error.value) and "\n" not in str(error.value)


def test_closed_schemas():
    inner = obj({"b": {"type": "null"}})
    schema = obj({"a": {"type": "array", "items": inner}, "additionalProperties": {}})
    shut = closed(schema)
    assert shut["additionalProperties"] is False and shut["properties"]["a"]["items"]["additionalProperties"] is False
    assert shut["properties"]["additionalProperties"] == {}
    assert closed(obj({}, additionalProperties=True))["additionalProperties"] is True
    combined = {"anyOf": [schema]}
    assert closed(combined) == combined
