"""K3's output, while it is generated, to reasoning, content and tool calls (spec model 10.6, 10.7; serving 8.6)."""

import json
import re
from collections.abc import Mapping, Sequence

from k3jax.chat.deltas import CallArguments, CallStart, Content, Delta, Finish, Message, Reasoning, Relabel, join
from k3jax.chat.encoding import CLOSE, CONTROL_NAMES, END, OPEN, SEP
from k3jax.chat.stops import StopStrings

_CONTROL = re.compile(f"({'|'.join(map(re.escape, CONTROL_NAMES))})")
_ATTRIBUTE = re.compile(r'\s([^\s="]+)="([^"]*)"')


class Parser:
    """One turn of output, in pieces; how it is cut changes nothing, and no input is an error.

    With `thinking` the output starts inside the think channel, else inside the response. Stop strings are matched in
    the content, which ends before the first; a tool call divides it. Once the turn is over, `ended` is True and more
    input is ignored.

    A call is sent once it is complete, so that one cut by the token limit is never sent. With `stream_calls` its
    arguments are sent while they are generated; a call that is cut then stays half sent.

    Where the output breaks the format: a tag that ends an element ends what is open inside it too; unknown tags vanish,
    but not the text in them. Text after a closed think channel is content at once, text after a closed response or
    tools channel is dropped. So are calls without a tool name and arguments without a key. The first of equal keys
    counts, for it may have been sent.
    """

    def __init__(self, thinking: bool, stop: str | Sequence[str] = (), stream_calls: bool = False):
        self.ended = False
        self._channel = "think" if thinking else "response"  # or "tools", or "" after a closed channel
        self._only_text: list[str] | None = []  # all output, until something proves that it is reasoning
        self._stops = StopStrings(stop)
        self._stream_calls = stream_calls
        self._call: _Call | None = None
        self._calls = 0  # finished ones
        self._tag: list[str] | None = None  # text since <|open|> or <|close|>
        self._opens = False
        self._pending = ""  # may become the name of a control token
        self._out: list[Delta] = []

    def feed(self, text: str, control: bool | None = None) -> list[Delta]:
        """Deltas that are certain after this piece of output.

        A caller with token ids passes the name of a special token with `control=True` and ordinary text with
        `control=False`: there a spelled `<|open|>` stays text. None is for text of unknown origin: every spelled
        control token counts as one, also across pieces. Specials without a meaning here vanish.
        """
        if control is None:
            *pieces, rest = _CONTROL.split(self._pending + text)  # text, name, text, ..., name, text
            start = _start_of_name(rest)
            pieces, self._pending = [*pieces, rest[:start]], rest[start:]
        else:
            pieces = [self._pending, text] if control else [self._pending + text]
            self._pending = ""
        for i, piece in enumerate(pieces):
            if self.ended:
                break
            if i % 2:
                self._feed_control(piece)
            elif piece:
                self._feed_text(piece)
        if self._call and self._stream_calls:
            self._send_arguments(self._call)
        return self._take()

    def finish(self, reason: str = "stop") -> list[Delta]:
        """What was held back, then `Finish`. `reason` tells why generation ended.

        An unfinished tag or call is dropped; after any reason but "stop", so is the begun name of a control token.
        """
        if reason == "stop" and not self.ended:
            self._feed_text(self._pending)
        self._flush_content()
        self.ended = True
        stop = self._stops.matched
        if stop is not None:
            reason = "stop"
        self._out.append(Finish("tool_calls" if reason == "stop" and self._calls else reason, stop))
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _feed_text(self, text: str) -> None:
        if self._tag is not None:
            self._tag.append(text)
        elif self._channel == "think":
            self._out.append(Reasoning(text))
            if self._only_text is not None:
                self._only_text.append(text)
        elif self._channel == "response":
            self._send_content(text)
        elif self._call:
            self._call.text(text)

    def _feed_control(self, name: str) -> None:
        if name in (OPEN.text, CLOSE.text):
            self._tag, self._opens = [], name == OPEN.text
        elif name == SEP.text and self._tag is not None:
            tag, self._tag = "".join(self._tag), None
            name = (tag.split(maxsplit=1) or [""])[0]
            if self._opens:
                self._open(name, {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tag)})
            else:
                self._close(name)
        elif name == END.text:
            self._end()

    def _open(self, name: str, attributes: Mapping[str, str]) -> None:
        match name:
            case "think" | "response" | "tools":
                self._enter(name)
            case "call":
                self._enter("tools")
                if attributes.get("tool"):
                    self._call = _Call(attributes["tool"])
                    if self._stream_calls:
                        self._out.append(CallStart(self._calls, self._call.name))
            case "argument" | "json" if self._call:
                self._call.open(name, attributes)
            case "argument" | "json":
                self._enter("tools")

    def _close(self, name: str) -> None:
        match name:
            case "think" if self._channel == "think":
                self._enter("response")
            case "response" if self._channel == "think" and self._only_text is not None:
                self._out.append(Relabel())
                self._send_content("".join(self._only_text))
                self._enter("")
            case "response" | "tools" if self._channel == name:
                self._enter("")
            case "call":
                self._end_call()
            case "argument" | "json" if self._call:
                self._call.close()
            case "message":
                self._end()

    def _enter(self, channel: str) -> None:
        self._end_call()
        if channel != self._channel:
            self._only_text = None
        if channel == "tools":
            self._flush_content()
        self._channel = channel

    def _end(self) -> None:
        self._end_call()
        self.ended = True

    def _send_content(self, text: str) -> None:
        shown = self._stops.feed(text)
        if shown:
            self._out.append(Content(shown))
        self.ended = self._stops.matched is not None

    def _flush_content(self) -> None:
        held = self._stops.flush()
        if held:
            self._out.append(Content(held))

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call:
            call.end()
            if not self._stream_calls:
                self._out.append(CallStart(self._calls, call.name))
            self._send_arguments(call)
            self._calls += 1

    def _send_arguments(self, call: "_Call") -> None:
        text = call.take()
        if text:
            self._out.append(CallArguments(self._calls, text))


class _Call:
    """Writes the JSON text of a call's arguments while their tags and values arrive."""

    def __init__(self, name: str):
        self.name = name
        self._out: list[str] = []  # JSON text not taken yet
        self._keys: set[str] = set()
        self._sealed = False  # a json block was all the arguments
        self._kind = ""  # of the open element: "string", "value" or "json"; "" is none or one to ignore
        self._value: list[str] = []  # its text, but for a string

    def open(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.close()
        key = attributes.get("key")
        if self._sealed:
            return
        if tag == "json":
            self._kind = "" if self._keys else "json"
        elif key is not None and key not in self._keys:
            self._out.append(f"{', ' if self._keys else '{'}{_dumps(key)}: ")
            self._keys.add(key)
            self._kind = "value"
            if attributes.get("type") == "string":
                self._kind = "string"
                self._out.append('"')

    def text(self, text: str) -> None:
        if self._kind == "string":
            self._out.append(_dumps(text)[1:-1])
        elif self._kind:
            self._value.append(text)

    def close(self) -> None:
        kind, self._kind = self._kind, ""
        text, self._value = "".join(self._value), []
        if kind == "string":
            self._out.append('"')
        elif kind == "value":
            self._out.append(_json_or_string(text))
        elif kind == "json" and text.strip():
            value = _json_or_string(text)
            self._out.append(value if value.startswith("{") else text)
            self._sealed = True

    def end(self) -> None:
        self.close()
        if not self._sealed:
            self._out.append("}" if self._keys else "{}")

    def take(self) -> str:
        text, self._out = "".join(self._out), []
        return text


def parse(text: str, thinking: bool, stop: str | Sequence[str] = (), finish_reason: str = "stop") -> Message:
    """A whole output, control tokens spelled in it, as a message; arguments as in `Parser` and its `finish`."""
    parser = Parser(thinking, stop)
    return join([*parser.feed(text), *parser.finish(finish_reason)])


def _start_of_name(text: str) -> int:
    """Where a suffix begins that may become the name of a control token, else the length."""
    start = text.rfind("<")
    return start if start >= 0 and any(name.startswith(text[start:]) for name in CONTROL_NAMES) else len(text)


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _json_or_string(text: str) -> str:
    """JSON text of the value; of the text itself if it is no JSON or holds what cannot be sent on (NaN, surrogates)."""
    try:
        value = _dumps(json.loads(text))
        value.encode()
        return value
    except (ValueError, RecursionError):
        return _dumps(text)
