"""Greedy accuracy on held-out problems, by task and mode, through the library's own decode loop."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from k3jax.chat.deltas import Message, join
from k3jax.chat.reader import OutputReader
from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from k3jax.decode import BATCHES, generate
from k3jax.params import Params
from train.tasks import CALCULATOR, Problem, evaluate, problems, result

BATCH = BATCHES[-1]
Chat = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Score:
    task: str
    thinking: bool
    right: int
    n: int
    mean_tokens: float  # generated per problem, all turns

    @property
    def accuracy(self) -> float:
        return self.right / self.n


def score(
    cfg: K3Config,
    params: Params,
    tokenizer: Tokenizer,
    task: str,
    *,
    n: int,
    seed: int = 0,
    thinking: bool = True,
    max_new_tokens: int = 128,
    report: Callable[[int], object] | None = None,
) -> Score:
    """Accuracy over n held-out problems; `report` gets the number of problems done after each batch.

    A problem is right when the model stops by itself and its response is the exact answer; where a calculator is
    declared, it also has to send exactly the expected calls, whose results it is then given.
    """
    asked = problems(task, n, seed=seed, held_out=True)
    right = tokens = 0
    for start in range(0, n, BATCH):
        part = asked[start : start + BATCH]
        flags, count = _score_batch(cfg, params, tokenizer, part, thinking, max_new_tokens)
        right, tokens = right + sum(flags), tokens + count
        if report:
            report(min(start + BATCH, n))
    return Score(task, thinking, right, n, tokens / n)


def _score_batch(
    cfg: K3Config, params: Params, tokenizer: Tokenizer, asked: Sequence[Problem], thinking: bool, limit: int
) -> tuple[list[bool], int]:
    chats: list[Chat] = [[problem.question()] for problem in asked]
    tools = [[CALCULATOR] if problem.calls else None for problem in asked]
    total = 0

    def turn(indices: list[int]) -> dict[int, Message]:
        nonlocal total
        if not indices:
            return {}
        prompts = [tokenizer.encode_chat(chats[i], tools=tools[i], thinking=thinking) for i in indices]
        out = generate(cfg, params, prompts, max_new_tokens=limit, stop_ids=tokenizer.stop_ids)
        total += sum(len(ids) + (reason == "stop") for ids, reason in zip(out.tokens, out.finish_reasons, strict=True))
        answers = zip(indices, out.tokens, out.finish_reasons, strict=True)
        return {i: read(tokenizer, ids, reason, thinking) for i, ids, reason in answers}

    first = turn(list(range(len(asked))))
    called = [i for i, problem in enumerate(asked) if problem.calls and _calls_match(first[i], problem)]
    for i in called:
        chats[i] += [assistant(first[i])]
        chats[i] += [result(j, str(evaluate(call))) for j, call in enumerate(asked[i].calls, start=1)]
    last = {i: message for i, message in first.items() if not asked[i].calls} | turn(called)
    flags = [i in last and _answers(last[i], problem) for i, problem in enumerate(asked)]
    return flags, total


def read(tokenizer: Tokenizer, ids: Sequence[int], reason: str, thinking: bool) -> Message:
    """Generated ids as a message."""
    reader = OutputReader(tokenizer, thinking=thinking)
    return join([*reader.feed(ids), *reader.finish(reason)])


def assistant(message: Message) -> dict[str, Any]:
    """The message as history, with its reasoning and calls."""
    calls = [
        {"id": f"calculator:{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(message.tool_calls, start=1)
    ]
    return {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning,
        **({"tool_calls": calls} if calls else {}),
    }


def _calls_match(message: Message, problem: Problem) -> bool:
    sent = [(call.name, json.loads(call.arguments or "{}")) for call in message.tool_calls]
    return sent == [("calculator", {"expression": expression}) for expression in problem.calls]


def _answers(message: Message, problem: Problem) -> bool:
    return message.finish_reason == "stop" and message.content == problem.answer and not message.tool_calls


def table(scores: Sequence[Score]) -> str:
    """Fixed-width text, one line per score."""
    lines = [f"{'task':<10}{'mode':<10}{'right':>12}{'accuracy':>10}{'tokens':>8}"]
    for s in scores:
        mode = "thinking" if s.thinking else "direct"
        lines.append(f"{s.task:<10}{mode:<10}{f'{s.right}/{s.n}':>12}{s.accuracy:>9.1%}{s.mean_tokens:>8.1f}")
    return "\n".join(lines)
