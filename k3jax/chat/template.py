"""Chat templates in Jinja, as the 48B's checkpoint ships one: sandboxed, and message text cannot forge specials."""

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from k3jax.chat.encoding import Segment
from k3jax.chat.messages import to_json
from k3jax.chat.tokenizer_files import read_json, read_text

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A checkpoint's template; `render` gives segments whose control parts are specials that the template wrote.

    In every string of the input, a character that could begin the name of a special is followed by a mark, a character
    that occurs nowhere in the input; marks are removed after the rendered text is cut at the names. A template sees
    the marks: only one that measures text or looks for a special's own name in it can notice. A name whose first
    characters the template itself writes directly before message text is not protected.
    """

    def __init__(self, source: str, names: Iterable[str], variables: Mapping[str, Any] | None = None):
        """`names` are the specials to cut at; `variables` are visible to the template (`bos_token` and the like)."""
        names = sorted(names, key=len, reverse=True)
        self._names = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        first, second = ("".join({re.escape(name[i]) for name in names if len(name) > i}) for i in (0, 1))
        self._beginnings = re.compile(f"([{first}])(?=$|[{first}{second}]|\\s)")
        self._variables = dict(variables or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is no valid Jinja ({error}); use the checkpoint's own file") from None

    def render(self, **inputs: Any) -> list[Segment]:
        """Segments for `messages`, `tools`, `add_generation_prompt` and whatever else the template reads."""
        mark = _unused_character(to_json(inputs, "the conversation"))
        try:
            text = self._template.render(self._variables | self._marked(inputs, mark))
        except Exception as error:  # a template can raise anything
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise ValueError(f"the chat template refuses this conversation: {reason}") from None
        pieces = self._names.split(text)  # text, name, text, name, ..., text
        escaped = json.dumps(mark)[1:-1]
        segments = (
            Segment(piece.replace(mark, "").replace(escaped, ""), control=bool(i % 2)) for i, piece in enumerate(pieces)
        )
        return [segment for segment in segments if segment.text]

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._beginnings.sub(rf"\1{mark}", value)
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value


def load_template(folder: Path, names: Iterable[str]) -> ChatTemplate:
    """From `chat_template.jinja` or `tokenizer_config.json`, which holds a text or a list with one named default."""
    config = read_json(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    source = read_text(path) if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{folder} has no chat template; put the checkpoint's chat_template.jinja there")
    tokens = {key: config.get(key) for key in _TOKENS}
    variables = {
        key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items() if token
    }
    return ChatTemplate(source, names, variables)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # unlike Jinja's own, without HTML escapes


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _unused_character(text: str) -> str:
    """A private-use character that the JSON text does not hold, neither as it is nor escaped."""
    for mark in map(chr, range(0xE000, 0xF900)):
        if mark not in text and json.dumps(mark)[1:-1] not in text:
            return mark
    raise ValueError("the conversation uses every private-use character up to U+F8FF; remove some")
