"""Tool calls and results of a conversation in the form and order that K3 expects (spec model 10.4, 10.6)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3jax.chat.messages import Message, to_json


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with `name` and `arguments` of a checked call, nested under `function` or not."""
    return call.get("function", call)


def parse_arguments(arguments: Any, where: str) -> Mapping[str, Any] | str:
    """Argument values by name, or the text itself when it is no JSON."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except RecursionError:
            raise ValueError(f"{where} arguments are nested too deeply; send a flatter object") from None
        except ValueError:
            return arguments
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{where} arguments are a JSON {json_type(parsed)}, not an object; send an object")
    return parsed


def json_type(value: Any) -> str:
    """JSON's name of a value's type, the `type` attribute of an argument."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def argument_text(value: Any, where: str) -> str:
    """A string as it is, anything else as JSON with the default separators."""
    return value if isinstance(value, str) else to_json(value, where)


def sort_results(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, with each run of tool results in the order of the calls that they answer.

    The results of a run whose ids all belong to the last assistant message take their names from its calls; a run with
    an id that does not resolve stays as it is.
    """
    calls: dict[str | None, tuple[int, str]] = {}
    run: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        yield from _sorted_run(run, calls)
        run = []
        if message["role"] == "assistant":
            calls = {}
            for position, call in enumerate(message.get("tool_calls") or ()):
                calls.setdefault(_call_id(call), (position, function_of(call)["name"]))  # the first of equal ids wins
            calls.pop(None, None)
        yield message
    yield from _sorted_run(run, calls)


def _sorted_run(run: list[Message], calls: Mapping[str | None, tuple[int, str]]) -> list[Message]:
    found = [calls.get(_call_id(message)) for message in run]
    resolved = [(call[0], {**message, "tool": call[1]}) for call, message in zip(found, run, strict=True) if call]
    if len(resolved) < len(run):
        return run
    return [message for _, message in sorted(resolved, key=lambda item: item[0])]


def _call_id(item: Mapping[str, Any]) -> str | None:
    """The id that a call has and its result repeats; ids are compared as strings."""
    id = item.get("tool_call_id")
    id = item.get("id") if id is None else id
    return None if id is None else str(id)
