"""Grammar of tool calls in K3's output format: one rule per tool, arguments by the tool's JSON schema."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k3jax.chat.tokenizer import Tokenizer
from serve.http.grammar import Source, source
from serve.http.schema_types import TooComplex, json_types, rooted, string_terminal

log = logging.getLogger(__name__)

# Beside these, a schema of arguments has nothing that ties them together, so each can be written on its own.
PLAIN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "title"}
PLAIN |= {"description", "default", "examples", "$comment", "strict"}
SPACED = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}  # as K3 was trained, or compact
FREE_KEY = "[A-Za-z_][A-Za-z0-9_]*"

Rules = list[str]


class Tags:
    """Tags of the output format in Lark."""

    def __init__(self, tokenizer: Tokenizer):
        self._open, self._close, self._sep = (
            f"<[{tokenizer.special[name]}]>" for name in ("<|open|>", "<|close|>", "<|sep|>")
        )

    def open(self, tag: str) -> str:
        return self.open_as(lark_string(tag))

    def open_as(self, terminal: str) -> str:
        return f"{self._open} {terminal} {self._sep}"

    def close(self, tag: str) -> str:
        return f"{self._close} {lark_string(tag)} {self._sep}"


def tool_rules(
    functions: Sequence[Mapping[str, Any]], tags: Tags, error: Callable[[Source], str | None]
) -> tuple[str, Rules]:
    """(rule of one call of any function, rules). Needs the terminal TEXT. Whatever the schemas say, it compiles:

    what llguidance cannot express is left unconstrained, with a warning in the log.
    """
    rules: Rules = []
    for i, function in enumerate(functions):
        prefix = f"t{i}"
        problems: list[str] = []
        for attempt in (_by_argument, _one_block, _lenient_block, _any_block):
            try:
                body, own = attempt(function.get("parameters"), prefix, tags, error)
            except (TooComplex, TypeError, AttributeError):  # the latter two: not a well-formed schema
                continue
            problem = error(_alone(body, own))
            if problem is None:
                break
            problems.append(problem)
        if attempt in (_lenient_block, _any_block):
            log.warning("arguments of tool %s are constrained in part: %s", function["name"], *problems[:1])
        head = f'/call tool="{function["name"]}" index="[1-9][0-9]?"/'
        rules += [f"{prefix}: {tags.open_as(head)} {body} {tags.close('call')}", *own]
    return f"({' | '.join(f't{i}' for i in range(len(functions)))})", rules


def lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _alone(body: str, rules: Rules) -> Source:
    return source({"lark_grammar": "\n".join([f'start: {body} ""', r"TEXT: /(.|\n)*/", *rules])})


def _by_argument(schema: Any, prefix: str, tags: Tags, error: Callable) -> tuple[str, Rules]:
    """One element per argument, as K3 writes calls."""
    if schema is None:
        return '""', []
    if not set(schema) <= PLAIN or "object" not in json_types(schema, schema):
        raise TooComplex
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    extra = schema.get("additionalProperties", "properties" not in schema)
    if not isinstance(properties, Mapping) or not set(required) <= set(properties):
        raise TooComplex
    parts: list[str] = []
    rules: Rules = []
    for i, (key, value) in enumerate(properties.items()):
        name = f"{prefix}_a{i}"
        rules += _argument(name, _attribute(key), value, schema, tags, error)
        parts.append(name if key in required else f"{name}?")
    if extra is not False:
        name = f"{prefix}_x"
        taken = "".join(f" & ~{lark_string(_attribute(key))}" for key in properties)
        rules.append(f"{name.upper()}_KEY: /{FREE_KEY}/{taken}")
        rules += _argument(name, None, extra, schema, tags, error)
        parts.append(f"{name}*")
    return " ".join(parts) or '""', rules


def _argument(name: str, key: str | None, schema: Any, root: Any, tags: Tags, error: Callable) -> Rules:
    """Rules of an argument: an alternative per JSON type. `key` None takes the terminal NAME_KEY."""
    alternatives: list[str] = []
    rules: Rules = []
    for kind in sorted(json_types(schema, root)):
        if key is None:
            rules.append(
                f'{name.upper()}_{kind.upper()}: "argument key=\\"" {name.upper()}_KEY "\\" type=\\"{kind}\\""'
            )
            head = f"{name.upper()}_{kind.upper()}"
        else:
            head = lark_string(f'argument key="{key}" type="{kind}"')
        if kind == "string":
            terminal = string_terminal(schema, root)
            if terminal is None:
                continue
            rules.append(f"{name.upper()}_TEXT: {terminal}")
            value = f"{name.upper()}_TEXT"
        else:
            value = f"{name}_{kind}"
            typed = json.dumps({**rooted(schema, root, kind), "x-guidance": SPACED})
            if error(source({"lark_grammar": f"start: %json {typed}"})) is not None:
                if len(json_types(schema, root)) == 1:
                    raise TooComplex
                continue
            rules.append(f"{value}: %json {typed}")
        alternatives.append(f"{tags.open_as(head)} {value} {tags.close('argument')}")
    if not alternatives:
        raise TooComplex
    return [f"{name}: {' | '.join(alternatives)}", *rules]


def _block(schema: Any, tags: Tags, **options: Any) -> tuple[str, Rules]:
    typed = json.dumps({**schema, "x-guidance": {**SPACED, **options}})
    return f"{tags.open('json type="object"')} %json {typed} {tags.close('json')}", []


def _one_block(schema: Any, prefix: str, tags: Tags, error: Callable) -> tuple[str, Rules]:
    """All arguments as one JSON text."""
    return _block(rooted(schema, schema, "object"), tags)


def _lenient_block(schema: Any, prefix: str, tags: Tags, error: Callable) -> tuple[str, Rules]:
    return _block(rooted(_without_patterns(schema), _without_patterns(schema), "object"), tags, lenient=True)


def _any_block(schema: Any, prefix: str, tags: Tags, error: Callable) -> tuple[str, Rules]:
    return _block({"type": "object"}, tags)


def _without_patterns(value: Any) -> Any:
    """A schema without the string rules that may be beyond llguidance; names of properties are left alone."""
    if isinstance(value, Mapping):
        return {
            key: {name: _without_patterns(inner) for name, inner in item.items()}
            if key in ("properties", "$defs", "definitions") and isinstance(item, Mapping)
            else _without_patterns(item)
            for key, item in value.items()
            if key not in ("pattern", "format", "patternProperties")
        }
    return [_without_patterns(item) for item in value] if isinstance(value, list) else value


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
