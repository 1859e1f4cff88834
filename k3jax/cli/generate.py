"""Answer prompts: as user messages in the chat encoding, or with --raw and --ids as text or ids to continue."""

import argparse
import sys
from typing import Any

from k3jax.chat import Tokenizer, load_tokenizer
from k3jax.chat.deltas import join
from k3jax.chat.reader import OutputReader
from k3jax.checkpoint import load
from k3jax.cli.common import add_model_arguments, dim, read_images, sampling_of, user_message
from k3jax.decode import generate
from k3jax.vision import embed_pictures, encode_chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="one answer each; without any, standard input is the prompt")
    add_model_arguments(parser)
    parser.add_argument("--show-thinking", action="store_true", help="print the think channel before the answer")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="show it before the prompt; may be repeated"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the text itself, without the chat encoding")
    form.add_argument("--ids", action="store_true", help="prompts are token ids (1,2,3), and so is the output")


def run(args: argparse.Namespace) -> int:
    sampling_of(args)
    prompts = args.prompt or [sys.stdin.read() if sys.stdin else ""]
    for i, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {i} is empty, the minimum is 1 token; give some text")
    if args.image and (args.raw or args.ids):
        raise ValueError("--image needs the chat encoding, --raw and --ids do without; leave one of them out")
    if args.ids:
        return _continue_ids(args, [_parse_ids(p) for p in prompts])
    tokenizer = load_tokenizer(args.model)
    pictures = read_images(args.model, args.image)
    cfg, params = load(args.model)
    if args.raw:
        tokens = [tokenizer.encode(p) for p in prompts]
    else:
        options = {"thinking": not args.no_thinking, "effort": args.effort}
        tokens = [encode_chat(cfg, tokenizer, [user_message(p, pictures)], pictures, **options) for p in prompts]
    images = [embed_pictures(cfg, params, pictures)] * len(prompts) if pictures else None
    out = generate(cfg, params, tokens, stop_ids=tokenizer.stop_ids, images=images, **sampling_of(args))
    for ids, reason in zip(out.tokens, out.finish_reasons, strict=True):
        print(tokenizer.decode(ids) if args.raw else _answer(args, tokenizer, ids, reason))
        if reason == "length":
            print(f"k3jax generate: stopped after {args.max_new_tokens} tokens, see --max-new-tokens", file=sys.stderr)
    return 0


def _continue_ids(args: argparse.Namespace, prompts: list[list[int]]) -> int:
    cfg, params = load(args.model)
    for ids in generate(cfg, params, prompts, **sampling_of(args)).tokens:
        print(",".join(map(str, ids)))
    return 0


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{text[:60]!r} is not a list of token ids; write whole numbers such as 1,2,3") from None


def _answer(args: argparse.Namespace, tokenizer: Tokenizer, ids: list[int], reason: str) -> str:
    reader = OutputReader(tokenizer, thinking=not args.no_thinking)
    message = join([*reader.feed(ids), *reader.finish(reason)])
    parts: list[Any] = [message.content, *(f"{call.name}({call.arguments})" for call in message.tool_calls)]
    if args.show_thinking and message.reasoning:
        parts.insert(0, dim(message.reasoning))
    return "\n".join(part for part in parts if part)
