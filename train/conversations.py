"""Training conversations: problems of the training split strung together under the modes of the chat encoding."""

import copy
import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3jax.chat.encoding import END, OPEN, SEP, Segment, render
from k3jax.chat.messages import EFFORTS
from k3jax.chat.prose import OWN_PROSE, load_prose
from k3jax.chat.tokenizer import Tokenizer
from train.tasks import CALCULATOR, TASKS, Problem, draw
from train.tasks.calculator import without_tool
from train.tasks.smalltalk import follow_up, remember, talk

PLAIN_TASKS = tuple(task for task in TASKS if task != "tool")
SYSTEM = ("You are a helpful assistant.", "You are nano.", "Be brief.", "Answer with the result only.", "Be helpful.")
OTHER_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, description, key in (
        ("get_weather", "Weather of a city.", "city"),
        ("search", "Search the web.", "query"),
        ("get_time", "Time in a city.", "city"),
    )
)
DESCRIPTIONS = (
    "Evaluate an arithmetic expression.", "Calculates.", "A calculator for whole numbers.", "Calculator",
    "Evaluate a product, a sum or a difference.", "Evaluates a math expression", "Compute the value of an expression.",
    "Basic arithmetic.", "Exact arithmetic on two numbers.",
)  # fmt: skip
ARGUMENT_DESCRIPTIONS = (
    "For example 37*48", "The expression to evaluate.", "Expression, e.g. 2*3", "What to compute",
    "arithmetic expression",
)  # fmt: skip
ANSWER_SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages and the options they are rendered with. With a trailing option only the first answer is a target."""

    messages: Sequence[Mapping[str, Any]]
    thinking: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None


def conversation(rng: random.Random, weights: Mapping[str, float], thinking: float) -> Conversation:
    """`weights`: task name or "chat" -> share of the exchanges; `thinking`: share of conversations that think."""
    think = rng.random() < thinking
    effort = rng.choice(EFFORTS) if think and rng.random() < 0.1 else None
    kind = rng.random()
    if kind < 0.03:
        return dataclasses.replace(_json(rng), thinking=think, effort=effort)
    if kind < 0.05:
        return dataclasses.replace(_forced(rng), thinking=think, effort=effort)
    names, shares = list(weights), list(weights.values())
    wanted = rng.choices(names, shares, k=rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 6)))
    tools = _tools(rng) if "tool" in wanted or rng.random() < 0.08 else None
    exchanges: list[Problem] = []
    for task in wanted:
        exchanges += _chat(rng, exchanges, tools is not None) if task == "chat" else [draw(task, rng, held_out=False)]
    messages = [message for problem in exchanges for message in problem.messages()]
    if rng.random() < 0.06:
        messages = [{"role": "system", "content": rng.choice(SYSTEM)}, *messages]
    return Conversation(messages, think, tools, effort)


def _chat(rng: random.Random, before: Sequence[Problem], tools: bool) -> list[Problem]:
    last = before[-1].answer if before and not before[-1].calls else ""
    if last.isdecimal() and len(last) <= 3 and rng.random() < 0.5:
        problem = follow_up(rng, int(last))
        return [problem] if problem else []
    kind = rng.random()
    if kind < 0.15:
        given, asked = remember(rng)
        between = [draw(rng.choice(PLAIN_TASKS), rng, held_out=False) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        return [given, *between, asked]
    if kind < 0.35 and not tools:
        return [without_tool(rng)]
    return [talk(rng)]


def _tools(rng: random.Random) -> list[dict[str, Any]]:
    """The calculator under various descriptions, sometimes beside a tool that is never called."""
    calculator = copy.deepcopy(CALCULATOR)
    if rng.random() < 0.6:
        function = calculator["function"]
        function["description"] = rng.choice(DESCRIPTIONS)
        expression = function["parameters"]["properties"]["expression"]
        expression["description"] = rng.choice(ARGUMENT_DESCRIPTIONS)
        if rng.random() < 0.3:
            del expression["description"]
        if rng.random() < 0.2:
            function["parameters"]["additionalProperties"] = False
    tools = [calculator, *([rng.choice(OTHER_TOOLS)] if rng.random() < 0.2 else [])]
    rng.shuffle(tools)
    return tools


def _sum(rng: random.Random) -> Problem:
    return draw(rng.choice(("add2", "add3", "sub2", "sub3")), rng, held_out=False)


def _json(rng: random.Random) -> Conversation:
    problem = _sum(rng)
    question, answer = problem.messages()
    answer = {**answer, "content": f'{{"answer":{problem.answer}}}'}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER_SCHEMA}}
    response_format = schema if rng.random() < 0.5 else {"type": "json_object"}
    return Conversation([question, answer], response_format=response_format)


def _forced(rng: random.Random) -> Conversation:
    """tool_choice against habit: a small sum through the calculator, a product without it."""
    if rng.random() < 0.5:
        return Conversation(without_tool(rng).messages(), tools=_tools(rng), tool_choice="none")
    problem = _sum(rng)
    sign = "+" if problem.task.startswith("add") else "-"
    a, b = _operands(problem)
    called = dataclasses.replace(problem, calls=(f"{a}{sign}{b}",), plan="Use the calculator.")
    return Conversation(called.messages()[:2], tools=_tools(rng), tool_choice="required")


def _operands(problem: Problem) -> tuple[int, int]:
    """In the order of the question; "subtract b from a" names b first."""
    numbers = [int(n) for n in "".join(c if c.isdecimal() else " " for c in problem.user).split()]
    a, b = numbers
    return (a, b) if problem.task.startswith("add") or a - b == int(problem.answer) else (b, a)


def encode(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Token ids and, for each, whether the model has to produce it: what follows the generation prompt of a turn up
    to and including its end of message."""
    ids: list[int] = []
    mask: list[bool] = []
    for segment, target in target_segments(conversation, _prose(tokenizer.folder)):
        piece = _encode_segment(tokenizer, segment)
        ids += piece
        mask += [target] * len(piece)
    return ids, mask


def target_segments(conversation: Conversation, prose: Mapping[str, str]) -> list[tuple[Segment, bool]]:
    """The rendered segments and whether each is the model's to produce."""
    c = conversation
    options: dict[str, Any] = {"tools": c.tools, "thinking": c.thinking, "effort": c.effort, "prose": prose}
    segments = render(c.messages, add_generation_prompt=False, **options)
    targets = assistant_segments(segments)
    if c.tool_choice or c.response_format:
        prompt = render(c.messages[:1], tool_choice=c.tool_choice, response_format=c.response_format, **options)
        answer = [s for s, target in zip(segments, targets, strict=True) if target]
        segments, targets = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    return list(zip(segments, targets, strict=True))


_prose = functools.lru_cache(load_prose)


def texts(seed: int, weights: Mapping[str, float], thinking: float, conversations: int = 5000) -> Iterator[str]:
    """Plain text segments of training conversations: what a tokenizer is learnt from."""
    for i in range(conversations):
        drawn = conversation(random.Random(f"{seed} text {i}"), weights, thinking)
        yield from (segment.text for segment, _ in target_segments(drawn, OWN_PROSE) if not segment.control)


@functools.lru_cache(2**16)
def _encode_segment(tokenizer: Tokenizer, segment: Segment) -> list[int]:
    return tokenizer.encode_segments([segment])


_HEADER = [OPEN, Segment("message"), Segment(" role"), Segment('="'), Segment("assistant"), Segment('"'), SEP]


def assistant_segments(segments: Sequence[Segment]) -> list[bool]:
    """For each segment, whether an assistant turn's generation prompt is behind it and its end is not."""
    header = len(_HEADER) + 3  # and the opening of its first channel
    out: list[bool] = []
    start: int | None = None
    for i, segment in enumerate(segments):
        if list(segments[i : i + len(_HEADER)]) == _HEADER:
            start = i + header
        out.append(start is not None and i >= start)
        if segment == END:
            start = None
    return out
