"""Grammar of a whole turn in K3's output format (spec model 10.7), around what a request constrains.

Control tokens are written as ids, so text that spells one is text. Free text is any valid UTF-8 without specials.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3jax.chat.tokenizer import Tokenizer
from serve.http.grammar import Body, Source, source
from serve.http.tool_grammar import Tags, tool_rules

TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True)
class Turn:
    """What a turn has to be.

    `content` constrains the answer. `functions` may be called; `calls` says whether: "required", "allowed" or
    "forbidden"; at most one with `parallel` False.
    """

    thinking: bool
    content: Body | None = None
    functions: Sequence[Mapping[str, Any]] = ()
    calls: str = "forbidden"
    parallel: bool = True


def turn_source(turn: Turn, tokenizer: Tokenizer, error: Callable[[Source], str | None]) -> Source:
    """The grammar; `error` tells why a part of it does not compile (`Grammars.error`)."""
    tags = Tags(tokenizer)
    tools, rules = "", list[str]()
    if turn.calls != "forbidden":
        calls, rules = tool_rules(turn.functions, tags, error)
        tools = f"{tags.open('tools')} {calls}{'+' if turn.parallel else ''} {tags.close('tools')}"
    body = "@content" if turn.content is not None else "TEXT"
    answer = f"{body} {tags.close('response')}"
    opened = f"{tags.open('response')} {answer}"
    if turn.calls == "required":
        text = f"TEXT {tags.close('response')}"  # beside a call that has to come, the answer is free
        channels = f"({tags.open('response')} {text})? {tools}" if turn.thinking else f"{text} {tools}"
    elif turn.calls == "allowed":
        channels = f"({opened} ({tools})? | {tools})" if turn.thinking else f"{answer} ({tools})?"
    else:
        channels = opened if turn.thinking else answer
    think = f"TEXT {tags.close('think')} " if turn.thinking else ""
    lark = "\n".join([f"start: {think}{channels} {tags.close('message')}", TEXT, *rules])
    return source({"lark_grammar": lark}, **({"content": turn.content} if turn.content is not None else {}))
