"""What a JSON schema says about types and strings, as far as K3's argument elements need it."""

import re
from collections.abc import Mapping
from typing import Any

import llguidance

TYPES = frozenset({"string", "number", "boolean", "array", "object", "null"})
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "nullable"}
STRING_RULES = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z]{2,})+",
}
FORMATS["date-time"] = f"{FORMATS['date']}T{FORMATS['time']}"


class TooComplex(Exception):
    """The schema needs more than separate argument elements."""


def json_types(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """JSON types that a value may have, as K3 names them (integer is number); may hold impossible ones."""
    if not isinstance(schema, Mapping):
        return TYPES if schema is not False else frozenset()
    types = TYPES
    declared = schema.get("type")
    if declared is not None:
        names = [declared] if isinstance(declared, str) else declared
        types &= {"number" if name == "integer" else name for name in names}
    if "const" in schema:
        types &= {type_name(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {type_name(value) for value in schema["enum"]}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        types &= json_types(resolve(reference, root), root, seen | {reference})
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= frozenset().union(*(json_types(branch, root, seen) for branch in schema[key]))
    for branch in schema.get("allOf") or ():
        types &= json_types(branch, root, seen)
    return types


def type_name(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"


def resolve(reference: str, root: Any) -> Any:
    """The schema that a local `#/...` points to; TooComplex for any other."""
    node = root
    if not reference.startswith("#"):
        raise TooComplex
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            raise TooComplex
    return node


def rooted(schema: Any, root: Any, kind: str) -> dict[str, Any]:
    """A schema on its own for the values of one type; what its references mean in `root` comes along."""
    inner = schema if isinstance(schema, Mapping) else {}
    declared = inner.get("type")
    if "$ref" not in str(inner) and declared in (kind, "integer" if kind == "number" else kind):
        return dict(inner)
    typed: dict[str, Any] = {"allOf": [{"type": kind}, _moved(inner)]}
    if "$ref" in str(inner):
        typed["$defs"] = {"root": _moved(root)}
    return typed


def _moved(value: Any) -> Any:
    """References into the root, now that it lies under #/$defs/root."""
    if isinstance(value, Mapping):
        return {
            key: f"#/$defs/root{item[1:]}"
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _moved(item)
            for key, item in value.items()
        }
    return [_moved(item) for item in value] if isinstance(value, list) else value


def string_terminal(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> str | None:
    """Lark terminal of the raw strings that fit, None if there are none; TooComplex if it cannot be told."""
    if not isinstance(schema, Mapping):
        return _ANY if schema is not False else None
    if "string" not in json_types(schema, root):
        return None
    rules = {key: value for key, value in schema.items() if key not in NOTES and not key.startswith("$defs")}
    for key in ("anyOf", "oneOf"):
        if set(rules) == {key}:
            found = [string_terminal(branch, root, seen) for branch in rules[key]]
            terminals = [terminal for terminal in found if terminal is not None]
            return " | ".join(f"({terminal})" for terminal in terminals) or None
    if set(rules) == {"$ref"} and rules["$ref"] not in seen:
        return string_terminal(resolve(rules["$ref"], root), root, seen | {rules["$ref"]})
    if set(rules) <= STRING_RULES:
        return _plain_terminal(rules)
    if "string" == schema.get("type") or {"$ref", "allOf", "anyOf", "oneOf", "not", "if"} & set(rules):
        raise TooComplex
    return _plain_terminal({key: value for key, value in rules.items() if key in STRING_RULES})


_ANY = r"/(.|\n)*/"


def _plain_terminal(rules: Mapping[str, Any]) -> str | None:
    values = [rules["const"]] if "const" in rules else rules.get("enum")
    if values is not None:
        if {"minLength", "maxLength", "pattern", "format"} & set(rules):
            raise TooComplex
        return " | ".join(f"/{_escape(value)}/" for value in values if isinstance(value, str)) or None
    parts: list[str] = []
    if "minLength" in rules or "maxLength" in rules:
        low, high = rules.get("minLength", 0), rules.get("maxLength", "")
        if not isinstance(low, int) or not isinstance(high, int | str):
            raise TooComplex
        parts.append(rf"/(.|\n){{{low},{high}}}/")
    if "pattern" in rules:
        parts.append(f"/{_searched(rules['pattern'])}/")
    if "format" in rules:
        if rules["format"] not in FORMATS:
            raise TooComplex
        parts.append(f"/{FORMATS[rules['format']]}/")
    return " & ".join(parts) or _ANY


def _escape(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _searched(pattern: Any) -> str:
    r"""A pattern that may match anywhere, as one for the whole text; anchors are understood at its two ends only."""
    if not isinstance(pattern, str):
        raise TooComplex
    inner = pattern.removeprefix("^")
    ends = inner.endswith("$") and not re.search(r"(^|[^\\])(\\\\)*\\\$$", inner)
    inner = inner[:-1] if ends else inner
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", inner)  # without escapes and classes
    if re.search(r"[$^]|\(\?[=!<]|\\b", bare) or ("|" in bare and inner != pattern and not _grouped(bare)):
        raise TooComplex
    start = "" if pattern.startswith("^") else r"(.|\n)*"
    return f"{start}({llguidance.regex_to_lark(inner, 'dw')}){'' if ends else r'(.|\n)*'}"


def _grouped(bare: str) -> bool:
    """No alternative outside parentheses."""
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return False
    return True


_TIED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties", "propertyNames"}
_TIED |= {"dependentSchemas", "dependentRequired"}


def closed(schema: Any) -> Any:
    """The schema without unnamed properties, as strict formats mean it; unchanged where parts of it are combined."""
    text = str(schema)
    return schema if any(f"'{key}'" in text for key in _TIED) else _closed(schema)


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    inner = {
        key: {name: _closed(item) for name, item in child.items()}
        if key in ("properties", "$defs") and isinstance(child, Mapping)
        else _closed(child)
        if key in ("items", "prefixItems")
        else child
        for key, child in value.items()
    }
    return {"additionalProperties": False, **inner} if isinstance(value.get("properties"), Mapping) else inner
