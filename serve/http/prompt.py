"""A chat request to the prompt's token ids, and what its answer has to obey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3jax.chat.messages import EFFORTS, IMAGE_PARTS
from k3jax.chat.tokenizer import Tokenizer
from serve.http.errors import bad
from serve.http.options import Options
from serve.http.schemas_chat import ChatMessage, NamedChoice, PromptFields, ResponseFormat, Tool

FunctionObject = Mapping[str, Any]


@dataclass(frozen=True)
class ChatPrompt:
    """`unbilled` tokens at the end open the answer and are no part of the reported prompt (spec serving 8.3).

    `functions` are those of all declared tools. `choice` is auto, none, required, or the name of the one to call, which
    `named` tells. `calls_before` counts the tool calls in the history.
    """

    ids: tuple[int, ...]
    thinking: bool
    unbilled: int
    functions: tuple[FunctionObject, ...]
    choice: str
    named: bool
    parallel: bool
    response_format: ResponseFormat | None
    calls_before: int


def chat_prompt(request: PromptFields, tokenizer: Tokenizer, options: Options) -> ChatPrompt:
    """Check what types cannot say, and render; errors are ApiError or ValueError with one sentence."""
    tools = _declared_tools(request)
    response_format = _checked_format(request.response_format)
    named = isinstance(request.tool_choice, NamedChoice)
    choice = _choice(request, [tool.function.name for tool in tools])
    thinking, effort = thinking_of(request, options)
    told = (
        "required" if isinstance(request.tool_choice, NamedChoice) else request.tool_choice
    )  # the named form has no text of its own in the prompt
    ids = tokenizer.encode_chat(
        _messages(request),
        [_plain(tool) for tool in request.tools] if request.tools else None,
        thinking,
        effort,
        told,
        response_format.model_dump(exclude_unset=True, by_alias=True) if response_format else None,
    )
    opener = tokenizer.special["<|open|>"] if tokenizer.xtml else None
    unbilled = ids[::-1].index(opener) + 1 if opener is not None else 0
    return ChatPrompt(
        ids=tuple(ids),
        thinking=thinking,
        unbilled=unbilled,
        functions=tuple(_plain(tool)["function"] for tool in tools),
        choice=choice,
        named=named,
        parallel=request.parallel_tool_calls is not False,
        response_format=response_format,
        calls_before=sum(len(message.tool_calls or ()) for message in request.messages),
    )


def thinking_of(request: PromptFields, options: Options) -> tuple[bool, str | None]:
    """Whether to think, and the effort: `thinking` wins, then `reasoning_effort`, then the template's variables."""
    thinking, kwargs = request.thinking, request.chat_template_kwargs
    on: bool | None = None
    if thinking is not None and thinking.type is not None:
        on = thinking.type == "enabled"
    elif request.reasoning_effort == "none":
        on = False
    elif kwargs is not None:
        on = kwargs.thinking
    efforts = (
        thinking.effort if thinking else None,
        request.reasoning_effort if request.reasoning_effort in EFFORTS else None,
        kwargs.thinking_effort if kwargs else None,
        options.effort,
    )
    return on is not False, next((effort for effort in efforts if effort), None)


def _declared_tools(request: PromptFields) -> list[Tool]:
    tools = list(request.tools or ())
    for i, message in enumerate(request.messages):
        where = f"messages.{i}.tools"
        if message.tools is not None and message.role not in ("system", "developer"):
            raise bad(where, f"{where} belongs to a {message.role} message; declare tools in a system message")
        if message.tools and message.content:
            raise bad(where, f"{where} comes with content, which would be ignored; send the text in another message")
        tools += message.tools or ()
    seen: set[str] = set()
    for tool in tools:
        if tool.function.name in seen:
            raise bad("tools", f"tool {tool.function.name} is declared twice; give every tool its own name")
        seen.add(tool.function.name)
    return tools


def _choice(request: PromptFields, names: Sequence[str]) -> str:
    choice = request.tool_choice
    if isinstance(choice, NamedChoice):
        if choice.function.name not in names:
            raise bad("tool_choice", f"tool_choice names {choice.function.name[:80]!r}, which no tool is called")
        return choice.function.name
    if choice == "required" and not names:
        raise bad("tool_choice", "tool_choice is required but there are no tools; declare one or choose auto")
    return choice or ("auto" if names else "none")


def _checked_format(response_format: ResponseFormat | None) -> ResponseFormat | None:
    if response_format and response_format.type == "json_schema" and response_format.json_schema is None:
        raise bad(
            "response_format.json_schema",
            "response_format of type json_schema has no json_schema; give it an object with name and schema",
        )
    return response_format


def _messages(request: PromptFields) -> list[dict[str, Any]]:
    kwargs = request.chat_template_kwargs
    keep = kwargs is None or kwargs.preserve_thinking is not False
    return [_message(i, message, keep) for i, message in enumerate(request.messages)]


def _message(index: int, message: ChatMessage, keep_reasoning: bool) -> dict[str, Any]:
    if message.role == "tool" and message.tool_call_id is None:
        where = f"messages.{index}.tool_call_id"
        raise bad(where, f"{where} is missing; give the id of the call that this message answers")
    if isinstance(message.content, list) and any(part.type in IMAGE_PARTS for part in message.content):
        where = f"messages.{index}.content"
        raise bad(where, f"{where} has an image, but this server reads text only; leave the image parts out")
    plain = _plain(message)
    if message.role == "developer":
        plain["role"] = "system"
    if not keep_reasoning:
        plain.pop("reasoning_content", None)
        plain.pop("reasoning", None)
    return plain


def _plain(model: ChatMessage | Tool) -> dict[str, Any]:
    return model.model_dump(exclude_unset=True)
