"""Fixed texts of K3's internal system messages; they belong to the checkpoint and are read from its folder.

`chat_prose.json` (name -> text) says which texts a checkpoint was trained with; without it they are looked up, by
digest, among the string constants of the released `encoding_k3.py`, which is parsed and never executed.
"""

import ast
import functools
import hashlib
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from k3jax.files import read_json

# Names of the texts. `tools`, `tools-dynamic` and `response_format:json_schema` are everything before the JSON.
OWN_PROSE: Mapping[str, str] = {
    "tools": "# Tools\nThese functions can be called.\n\n```json\n",
    "tools-dynamic": "## More tools\nThese functions can be called from here on as well.\n\n```json\n",
    "effort:low": "Think briefly: `thinking_effort=low`.",
    "effort:high": "Think well: `thinking_effort=high`.",
    "effort:max": "Think as long as it helps: `thinking_effort=max`.",
    "tool_choice:required": "`tool_choice=required`: the next message has to contain a tool call.",
    "tool_choice:none": "`tool_choice=none`: the next message has to do without tool calls.",
    "response_format:json_object": "`response_format=json_object`: answer with one JSON object and nothing around it.",
    "response_format:json_schema": (
        "`response_format=json_schema`: answer with JSON that fits this schema and nothing around it.\n```json\n"
    ),
}

# (bytes, SHA-256) of the released texts (spec model 10.5).
RELEASED: Mapping[str, tuple[int, str]] = {
    "tools": (72, "bbd0773d27b2a814a023a7a142c098958b170dbad77e461b286844512b5b74e7"),
    "tools-dynamic": (188, "b5f3063ffeff6dab49436f59a41291fbdc826cc76653f98f26c514cd7cf7b74a"),
    "effort:low": (223, "003035f6bf61ffe6180f4bd5e5a12df1a7cc0cf4550ef78f5591ce8a4537f5fe"),
    "effort:high": (224, "a8513c631231c09d25027f0e0439194e4290e755fb20932c9f49dd7fa9d6ffc0"),
    "effort:max": (223, "20389202b5a9e0b3b556c90431fb62dc2f1bdb13a6e23fb7b516a3c2da848580"),
    "tool_choice:required": (91, "e2c3dc236d94164ab96601b3ff7891ad44cdc7d6b38583ab552be33a6bff5f53"),
    "tool_choice:none": (95, "efabd595d24633a14929fd64b8c21542cb13e3e6637ced319c5bec433900a2bb"),
    "response_format:json_object": (162, "a88696fd119e35cae2c9cb15ed5a8230bedb9f46e07231f9f85e893e0f993b84"),
    "response_format:json_schema": (218, "35c44c528f6c1e2254d8f2e06a68b56506c231c2f4f0ce19617255a8102ebabe"),
}


def load_prose(folder: Path) -> Mapping[str, str]:
    """Texts by name. What the folder does not have is our own wording, with one warning per process."""
    own = folder / "chat_prose.json"
    if own.is_file():
        return _read_texts(own)
    source = folder / "encoding_k3.py"
    if not source.is_file():
        _warn(f"{source} is missing")
        return OWN_PROSE
    found = find_prose(source, RELEASED)
    missing = [name for name in RELEASED if name not in found]
    if missing:
        _warn(f"{source} has no text with the known digest for {', '.join(missing)}")
    return {**OWN_PROSE, **found}


def find_prose(source: Path, digests: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    """The texts with these (bytes, SHA-256) that the strings of a Python file can make, by name."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source} is not a Python file ({error}); download it again") from None
    names = {digest: name for name, digest in digests.items()}
    sizes = {size for size, _ in names}
    found = {}
    for candidate in _candidates(tree):
        plain = textwrap.dedent(candidate) if "\n " in candidate else candidate
        for text in {candidate, plain.lstrip(), plain.strip()}:
            data = text.encode(errors="surrogatepass")
            if len(data) in sizes:
                name = names.get((len(data), hashlib.sha256(data).hexdigest()))
                if name:
                    found[name] = text
    return found


def _candidates(tree: ast.Module) -> Iterator[str]:
    """Every string up to its end or one of its holes, earlier holes filled with any other strings of the file."""
    nodes = list(ast.walk(tree))
    strings = sorted({node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)})
    short = [text for text in strings if len(text) <= 40]  # two holes at once: what an option puts into a sentence
    templates = {_template(node) for node in nodes}
    templates |= {tuple(piece for part in parts for piece in _FIELD.split(part)) for parts in templates}
    for parts in templates:
        for holes in range(min(len(parts), 3)):
            for fill in itertools.product(strings if holes < 2 else short, repeat=holes):
                yield parts[0] + "".join(value + part for value, part in zip(fill, parts[1:], strict=False))


_FIELD = re.compile(r"\{\w*\}|%s|%\(\w+\)s")  # of str.format and %
_HOLE = ("", "")


def _template(node: ast.AST) -> tuple[str, ...]:
    """The literal texts of a string expression, with a hole between two of them where its value is not constant."""
    match node:
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.JoinedStr(values=values):
            return functools.reduce(_concat, map(_template, values), ("",))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _concat(_template(left), _template(right))
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"),
            args=[ast.List(elts=[first, *rest]) | ast.Tuple(elts=[first, *rest])],
        ):
            return functools.reduce(
                lambda a, b: _concat(_concat(a, (separator,)), _template(b)), rest, _template(first)
            )
    return _HOLE


def _concat(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    return (*left[:-1], left[-1] + right[0], *right[1:])


def _read_texts(path: Path) -> Mapping[str, str]:
    texts = read_json(path)
    if (
        not isinstance(texts, dict)
        or set(texts) != set(OWN_PROSE)
        or not all(isinstance(t, str) for t in texts.values())
    ):
        raise ValueError(f"{path} is not an object with the texts {', '.join(OWN_PROSE)}; give exactly these")
    return texts


_warned = False


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{reason}; system messages for tools, effort and formats use this library's own words", stacklevel=2
        )
