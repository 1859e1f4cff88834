"""K3's chat encoding, XTML: a conversation becomes segments that are tokenised one by one (spec model 10.2 to 10.6)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from k3jax.chat.messages import IMAGE_PARTS, Message, check_messages, check_options, check_tools, compact_json
from k3jax.chat.prose import OWN_PROSE
from k3jax.chat.tool_calls import argument_text, function_of, json_type, parse_arguments, sort_results

IMAGE_SLOT = "<|kimi_image_placeholder|>"  # an image whose size is not known yet


class Segment(NamedTuple):
    """A piece of a prompt: text, or with `control` a special token or an image block."""

    text: str
    control: bool = False


OPEN = Segment("<|open|>", True)
CLOSE = Segment("<|close|>", True)
SEP = Segment("<|sep|>", True)
END = Segment("<|end_of_msg|>", True)
CONTROL_NAMES = tuple(segment.text for segment in (OPEN, CLOSE, SEP, END))


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    *,
    response_schema: Mapping[str, Any] | None = None,
    image_sizes: Sequence[tuple[int, int]] | None = None,
    prose: Mapping[str, str] = OWN_PROSE,
) -> list[Segment]:
    """Segments of a conversation in OpenAI's format, tool results sorted into call order; bad input is a ValueError.

    `image_sizes` are the original (width, height) of each image part in pixels, in order; without it an image is
    `IMAGE_SLOT`. `response_schema` replaces the schema of `response_format`. `prose` holds the fixed texts by name.
    """
    check_messages(messages)
    check_options(effort, tool_choice, response_format)
    out: list[Segment] = []
    if tools:
        check_tools(tools)
        out += _declare_tools(prose["tools"], tools, "tools")
    if thinking and effort:
        out += _internal("thinking-effort", prose[f"effort:{effort}"])
    images = _images(image_sizes)
    out += _conversation(messages, thinking, images, prose)
    if image_sizes is not None and next(images, None) is not None:
        raise ValueError(f"there are {len(image_sizes)} image_sizes but fewer image parts; give one size per image")
    if tool_choice in ("required", "none"):
        out += _internal("tool-choice", prose[f"tool_choice:{tool_choice}"])
    kind = response_format["type"] if response_format else None
    if kind == "json_object":
        out += _internal("response-format", prose["response_format:json_object"])
    if kind == "json_schema":
        schema = compact_json(_schema(response_format, response_schema), "the response schema")
        out += _internal("response-format", f"{prose['response_format:json_schema']}{schema}\n```")
    if add_generation_prompt:
        out += [*_open("message", role="assistant"), *_open("think" if thinking else "response")]
    return [segment for segment in out if segment.text]


def image_block(width: int, height: int) -> str:
    """Text of an image's control segment: its original size in pixels and one pad, to be repeated once per token."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def _open(tag: str, **attributes: object) -> list[Segment]:
    out = [OPEN, Segment(tag)]
    for key, value in attributes.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        out += [Segment(f" {key}"), Segment('="'), Segment(escaped), Segment('"')]
    return [*out, SEP]


def _close(tag: str) -> list[Segment]:
    return [CLOSE, Segment(tag), SEP]


def _element(tag: str, body: Sequence[Segment], **attributes: object) -> list[Segment]:
    return [*_open(tag, **attributes), *body, *_close(tag)]


def _message(body: Sequence[Segment], **attributes: object) -> list[Segment]:
    return [*_element("message", body, **attributes), END]


def _internal(kind: str, text: str) -> list[Segment]:
    return _message([Segment(text)], role="system", type=kind)


def _declare_tools(heading: str, tools: Any, where: str) -> list[Segment]:
    return _internal("tool-declare", f"{heading}{compact_json(tools, where)}\n```")


def _conversation(
    messages: Sequence[Message], thinking: bool, images: Iterator[Segment], prose: Mapping[str, str]
) -> Iterator[Segment]:
    calls: Sequence[Mapping[str, Any]] = ()
    results = 0  # tool results since the last assistant message
    for message in sort_results(messages):
        role = message["role"]
        name = {"name": message["name"]} if message.get("name") else {}
        if role == "system" and message.get("tools"):
            yield from _declare_tools(prose["tools-dynamic"], message["tools"], "tools of a system message")
        elif role == "assistant":
            calls, results = message.get("tool_calls") or (), 0
            yield from _message(_assistant(message, calls, thinking, images), role=role, **name)
        elif role == "tool":
            results += 1
            tool = _tool_name(message, calls, results)
            yield from _message(_content(message, images), role=role, tool=tool, index=results)
        else:
            yield from _message(_content(message, images), role=role, **name)


def _assistant(
    message: Message, calls: Sequence[Mapping[str, Any]], thinking: bool, images: Iterator[Segment]
) -> list[Segment]:
    out: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        out += _element("think", [Segment(reasoning)] if reasoning.strip() else [])
    out += _element("response", _content(message, images))
    if calls:
        out += _element("tools", [segment for i, call in enumerate(calls, 1) for segment in _call(call, i)])
    return out


def _call(call: Mapping[str, Any], index: int) -> list[Segment]:
    function = function_of(call)
    where = f"tool call {index} ({function['name']})"
    arguments = parse_arguments(function.get("arguments"), where)
    if isinstance(arguments, str):
        body = _element("json", [Segment(arguments)], type="object")
    else:
        body = [
            segment
            for key, value in arguments.items()
            for segment in _element("argument", [Segment(argument_text(value, where))], key=key, type=json_type(value))
        ]
    return _element("call", body, tool=function["name"], index=index)


def _tool_name(message: Message, calls: Sequence[Mapping[str, Any]], index: int) -> str:
    name = message.get("tool") or message.get("name")
    if name:
        return name
    if index <= len(calls):
        return function_of(calls[index - 1])["name"]
    raise ValueError(
        f"tool message {index} after an assistant message with {len(calls)} calls answers none of them;"
        " give it the tool_call_id of a call, or a name"
    )


def _content(message: Message, images: Iterator[Segment]) -> list[Segment]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return [Segment(content)]
    return [_image(images) if part["type"] in IMAGE_PARTS else Segment(part["text"]) for part in content]


def _image(images: Iterator[Segment]) -> Segment:
    image = next(images, None)
    if image is None:
        raise ValueError("there are more image parts than image_sizes; give one (width, height) per image")
    return image


def _images(sizes: Sequence[tuple[int, int]] | None) -> Iterator[Segment]:
    if sizes is None:
        return itertools.repeat(Segment(IMAGE_SLOT, True))
    for size in sizes:
        if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ValueError(f"image size {size!r} is not (width, height) in pixels; give two positive integers")
    return (Segment(image_block(*size), True) for size in sizes)


def _schema(response_format: Any, override: Any) -> Mapping[str, Any]:
    outer = response_format.get("json_schema")
    schema = outer.get("schema", outer.get("json_schema", outer)) if isinstance(outer, Mapping) else None
    schema = schema if override is None else override
    if not isinstance(schema, Mapping):
        raise ValueError("response_format of type json_schema has no schema object; give it under json_schema.schema")
    return schema
