"""Generated schemas of tool arguments, wrapped as the vendor's verifier does (spec serving 10.6): no schema is refused,

and what the grammar lets through fits the schema, which another library judges.
"""

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from k3jax.chat.deltas import join
from k3jax.chat.reader import OutputReader
from serve.http.grammar import Grammars
from serve.http.turn_grammar import Turn, turn_source
from tests.serve.http.fake import VOCAB
from tests.serve.http.walker import walk

KEYS = st.sampled_from(["a", "b c", 'q"&', "é", "type", "properties", "x" * 30])
TEXTS = st.sampled_from(["", "a", "b/c", 'd"e', "<|sep|>", "ü\n", "null", "1"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), TEXTS)


@st.composite
def ranges(draw, low, high):
    """(smallest, largest), in order, either may be missing."""
    small, large = sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high))))
    return (small if draw(st.booleans()) else None), (large if draw(st.booleans()) else None)


def bounded(kind, names, low, high):
    def build(pair):
        return {"type": kind, **{n: v for n, v in zip(names, pair, strict=True) if v is not None}}

    return ranges(low, high).map(build)


LEAVES = st.one_of(
    st.sampled_from([{"type": "string"}, {"type": "boolean"}, {"type": "null"}, {}]),
    bounded("string", ("minLength", "maxLength"), 0, 5),
    bounded("integer", ("minimum", "maximum"), -20, 20),
    bounded("number", ("minimum", "maximum"), -3, 3),
    bounded("integer", ("exclusiveMinimum", "maximum"), -1, 1).filter(
        lambda s: s.get("exclusiveMinimum", -9) < s.get("maximum", 9)
    ),
    st.sampled_from(["^[a-c]+$", "x", "^(red|green)$", "[0-9]", r"^\w\d$", "a|b"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
    st.lists(SCALARS, min_size=1, max_size=3, unique_by=json.dumps).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.lists(st.sampled_from(["string", "integer", "null", "boolean"]), min_size=1, max_size=3, unique=True).map(
        lambda types: {"type": types}
    ),
    st.just({"$ref": "#/$defs/leaf"}),
    st.just({"$ref": "#/$defs/tree"}),
)


def objects(inner):
    def build(args):
        properties, required, extra = args
        schema = {"type": "object", "properties": properties}
        names = [name for name, wanted in zip(properties, required, strict=False) if wanted]
        return {**schema, **({"required": names} if names else {}), **extra}

    extra = st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "null"}}])
    return st.tuples(st.dictionaries(KEYS, inner, max_size=3), st.lists(st.booleans(), min_size=3), extra).map(build)


def branches(inner):
    arrays = st.tuples(inner, ranges(0, 2)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1][0] or 0, "maxItems": 2}
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    return st.one_of(objects(inner), arrays, unions)


TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = st.recursive(LEAVES, branches, max_leaves=6).map(
    lambda value: {
        "type": "object",
        "properties": {"value": value},
        "required": ["value"],
        "additionalProperties": False,
        "$defs": {"leaf": {"type": ["string", "integer"], "description": "either"}, "tree": TREE},
    }
)


@pytest.fixture(scope="module")
def grammars(tok):
    return Grammars(tok, VOCAB)


@pytest.mark.parametrize("examples", [25, pytest.param(600, marks=pytest.mark.slow)])
def test_any_schema_is_obeyed(tok, grammars, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schema=SCHEMAS, seed=st.integers(0, 3), thinking=st.booleans())
    def check(schema, seed, thinking):
        turn = Turn(thinking, functions=[{"name": "f", "parameters": schema}], calls="required", parallel=False)
        source = turn_source(turn, tok, grammars.error)
        ids = walk(tok, grammars.compile(source), seed)
        assume(not re.search(r"\d[eE]\+?\d{3}", tok.decode(ids)))  # JSON, but beyond a float
        reader = OutputReader(tok, thinking)
        [call] = join([*reader.feed(ids), *reader.finish("stop")]).tool_calls
        jsonschema.validate(json.loads(call.arguments), schema, cls=jsonschema.Draft202012Validator)

    check()
