"""Checks of a conversation in OpenAI's message format, before any of it is rendered; every error is a ValueError."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
IMAGE_PARTS = ("image", "image_url")
EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "required", "none")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

Message = Mapping[str, Any]


def check_messages(messages: Any) -> None:
    """Every message has a known role, content that can be rendered, and well-formed names, reasoning and calls."""
    if not _is_list(messages) or not messages:
        raise ValueError(f"messages is {_short(messages)}, not a list of at least one message; pass a list of objects")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {_short(message)}, not an object; give it a role and content")
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"{where} has the role {_short(role)}; use one of {', '.join(ROLES)}")
        declares = role == "system" and message.get("tools")
        if declares:
            check_tools(message["tools"], f"{where}.tools")
        if message.get("content") is None and role != "assistant" and not declares:
            raise ValueError(f"{where} has no content; give the {role} message a string or a list of parts")
        _check_content(message.get("content"), where)
        for key in ("name", "tool", "reasoning_content", "reasoning"):
            if not isinstance(message.get(key), str | None):
                raise ValueError(
                    f"{where}.{key} is {_short(message[key])}, not a string; pass a string or leave it out"
                )
        if role == "assistant" and message.get("tool_calls") is not None:
            _check_calls(message["tool_calls"], f"{where}.tool_calls")


def check_tools(tools: Any, where: str = "tools") -> None:
    """`tools` is a list of JSON objects."""
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{where} is {_short(tools)}, not a list of objects; give each tool as an object")


def check_options(effort: Any, tool_choice: Any, response_format: Any) -> None:
    """Known effort, tool choice and response format; a tool choice that names a function is an object."""
    if effort is not None and effort not in EFFORTS:
        raise ValueError(f"effort is {_short(effort)}; use one of {', '.join(EFFORTS)} or None")
    if not isinstance(tool_choice, Mapping | None) and tool_choice not in TOOL_CHOICES:
        raise ValueError(
            f"tool_choice is {_short(tool_choice)}; use one of {', '.join(TOOL_CHOICES)} or name a function"
        )
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in RESPONSE_FORMATS:
        raise ValueError(
            f"response_format is {_short(response_format)}; pass an object of type {', '.join(RESPONSE_FORMATS)}"
        )


def image_parts(messages: Sequence[Message]) -> Iterator[Message]:
    """The image parts of checked messages, in order."""
    for message in messages:
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            yield from (part for part in content if part["type"] in IMAGE_PARTS)


def compact_json(value: Any, where: str) -> str:
    """JSON without spaces, keys sorted at every level, non-ASCII kept (spec model 10.5)."""
    return to_json(value, where, separators=(",", ":"), sort_keys=True)


def to_json(value: Any, where: str, **options: Any) -> str:
    """`json.dumps` with non-ASCII kept, whose failures name the value."""
    try:
        return json.dumps(value, ensure_ascii=False, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON ({error}); pass plain JSON values") from None


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str | None):
        return
    if not _is_list(content):
        raise ValueError(f"{where}.content is {_short(content)}; pass a string or a list of parts")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise ValueError(f"{where}.content[{i}] is {_short(part)}, not an object; give each part as one")
        if part.get("type") not in IMAGE_PARTS and not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where}.content[{i}] is {_short(part)}; give it a string under text, or one of the types"
                f" {' and '.join(IMAGE_PARTS)}"
            )


def _check_calls(calls: Any, where: str) -> None:
    if not _is_list(calls):
        raise ValueError(f"{where} is {_short(calls)}, not a list; pass a list of calls")
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}[{i}] is {_short(call)}; give it a function with a name")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
