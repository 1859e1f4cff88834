"""Talk to a model in the terminal: answers stream, the think channel is dimmed, tool results are asked for."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3jax.chat import Tokenizer, load_tokenizer
from k3jax.chat.deltas import CallArguments, CallStart, Content, Delta, Finish, Message, Reasoning, Relabel, join
from k3jax.chat.messages import check_tools, image_parts
from k3jax.chat.reader import OutputReader
from k3jax.checkpoint import load
from k3jax.cli.common import add_model_arguments, dim, read_images, sampling_of, user_message
from k3jax.config import K3Config
from k3jax.decode import stream
from k3jax.files import read_json
from k3jax.params import Params
from k3jax.vision import Picture, embed_pictures, encode_chat

HELP = (
    "/image FILE shows a picture with your next message, /reset forgets the conversation, /exit or end of input leaves"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message to start with (default: none)")
    parser.add_argument(
        "--tools", type=Path, metavar="FILE", help="JSON list of tools in OpenAI's format; you are asked for results"
    )


def run(args: argparse.Namespace) -> int:
    sampling_of(args)
    tools = _read_tools(args.tools) if args.tools else None
    tokenizer = load_tokenizer(args.model)
    session = Session(args, *load(args.model), tokenizer, tools)
    print(dim(f"{args.model}: {HELP}"))
    while (line := _ask("> ")) is not None:
        if line in ("/exit", "/quit"):
            break
        elif line == "/reset":
            session.reset()
        elif line.startswith("/image "):
            try:
                session.show(line.removeprefix("/image ").strip())
            except (ValueError, OSError) as error:
                print(f"k3jax chat: {error}", file=sys.stderr)
        elif line.startswith("/"):
            print(dim(HELP))
        elif line.strip():
            try:
                session.turn(line)
            except KeyboardInterrupt:
                session.forget_turn()
                print(dim("\ninterrupted; this turn is forgotten"))
            except ValueError as error:
                session.forget_turn()
                print(f"k3jax chat: {error}; or /reset", file=sys.stderr)
    return 0


class Session:
    """One conversation; a turn is a user message, the answer, and any tool calls with their results."""

    def __init__(
        self, args: argparse.Namespace, cfg: K3Config, params: Params, tokenizer: Tokenizer, tools: list[Any] | None
    ):
        self.args, self.cfg, self.params, self.tokenizer, self.tools = args, cfg, params, tokenizer, tools
        self.thinking = not args.no_thinking
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        if self.args.system:
            self.messages.append({"role": "system", "content": self.args.system})
        self.turn_start = len(self.messages)
        self.shown: list[Picture] = []  # go with the next message
        self.embeddings: dict[bytes, Any] = {}  # picture's digest -> its rows

    def show(self, file: str) -> None:
        self.shown += read_images(self.args.model, [file])
        picture = self.shown[-1]
        print(dim(f"{picture.width}x{picture.height} pixels, {picture.tokens} tokens, goes with your next message"))

    def forget_turn(self) -> None:
        del self.messages[self.turn_start :]

    def turn(self, text: str) -> None:
        """Answer a user message, asking for the results of tool calls until the model makes none."""
        self.turn_start = len(self.messages)
        self.messages.append(user_message(text, self.shown))
        self.shown = []
        while True:
            answer = self.answer()
            calls: list[dict[str, Any]] = [
                {"id": f"{call.name}:{i}", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(answer.tool_calls)
            ]
            reply = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
            self.messages.append(reply | ({"tool_calls": calls} if calls else {}))
            if not calls:
                return
            for call in calls:
                result = _ask(f"{call['function']['name']} returns> ")
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result or ""})

    def answer(self) -> Message:
        """Generate one assistant message and print it while it comes."""
        pictures = [part["picture"] for part in image_parts(self.messages)]
        options = {"tools": self.tools, "thinking": self.thinking, "effort": self.args.effort}
        prompt = encode_chat(self.cfg, self.tokenizer, self.messages, pictures, **options)
        deltas = []
        for delta in self._deltas(prompt, pictures):
            deltas.append(delta)
            _show(delta)
        print()
        return join(deltas)

    def _deltas(self, prompt: list[int], pictures: list[Picture]) -> Iterator[Delta]:
        reader = OutputReader(self.tokenizer, self.thinking, stream_calls=True)
        options = {"stop_ids": self.tokenizer.stop_ids, **sampling_of(self.args)}
        pieces = stream(self.cfg, self.params, prompt, images=self._embed(pictures), **options)
        for ids, reason in pieces:
            yield from reader.feed(ids)
            if reason is not None:
                yield from reader.finish(reason)

    def _embed(self, pictures: list[Picture]) -> list[Any] | None:
        for picture in pictures:
            if picture.digest not in self.embeddings:
                self.embeddings[picture.digest] = embed_pictures(self.cfg, self.params, [picture])[0]
        return [self.embeddings[picture.digest] for picture in pictures] or None


def _show(delta: Delta) -> None:
    match delta:
        case Reasoning(text):
            print(dim(text), end="", flush=True)
        case Relabel():
            print(dim(" (that was the answer:)"))
        case Content(text):
            print(text, end="", flush=True)
        case CallStart(_, name):
            print(f"\n{name} ", end="", flush=True)
        case CallArguments(_, text):
            print(text, end="", flush=True)
        case Finish(reason="length"):
            print(dim(" [cut at --max-new-tokens]"), end="")


def _ask(prompt: str) -> str | None:
    """A line from the user, None at the end of input; the prompt is shown on a terminal only."""
    if sys.stdin is None:
        return None
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _read_tools(path: Path) -> list[Any]:
    try:
        tools = read_json(path)
        check_tools(tools)
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON list of tools ({error}); give a list of objects") from None
    return tools
