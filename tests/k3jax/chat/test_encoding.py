import json
import re

import pytest

from k3jax.chat import Tokenizer
from k3jax.chat.encoding import IMAGE_SLOT, Segment, render
from k3jax.chat.prose import OWN_PROSE
from tests.conftest import DATA
from tests.k3jax.chat.folders import write_folder

GOLDEN = [json.loads(line) for line in (DATA / "golden" / "k3_tiny" / "chat.jsonl").read_text().splitlines()]
PLACEHOLDERS = {name: f"{{{{PROSE:{name}}}}}" for name in OWN_PROSE}
USER = {"role": "user", "content": "q"}


def golden_options(record):
    options = dict(record["options"])
    if "thinking_effort" in options:
        options["effort"] = options.pop("thinking_effort")
    if "image_prompts" in options:
        sizes = [re.search(r"(\d+)x(\d+)", prompt).groups() for prompt in options.pop("image_prompts")]
        options["image_sizes"] = [(int(width), int(height)) for width, height in sizes]
    return options


@pytest.mark.parametrize("record", GOLDEN, ids=lambda record: record["name"])
def test_released_renderings(record):
    before = json.dumps(record)
    segments = render(record["messages"], record["tools"], **golden_options(record), prose=PLACEHOLDERS)
    assert [list(segment) for segment in segments] == record["segments"]
    assert "".join(segment.text for segment in segments) == record["rendered"]
    assert json.dumps(record) == before  # the caller's messages are left alone


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("xtml"))
    (folder / "chat_prose.json").write_text(json.dumps(PLACEHOLDERS))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    "record", [r for r in GOLDEN if IMAGE_SLOT not in r["rendered"]], ids=lambda record: record["name"]
)
def test_ids_of_released_renderings(tokenizer, record):
    ids = tokenizer.encode_chat(record["messages"], record["tools"], **golden_options(record))
    assert tokenizer.decode(ids) == record["rendered"]
    names = [tokenizer.decode([id]) for id in ids if tokenizer.is_special(id)]
    control = "".join(text for text, control in record["segments"] if control)
    assert names == re.findall(r"<\|\w+\|>", control)


def text_of(messages, **options):
    return "".join(s.text for s in render(messages, thinking=False, add_generation_prompt=False, **options))


def call(id, name="f", arguments=None):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(calls, *results):
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *({"role": "tool", **r} for r in results)]


def results_of(messages):
    return re.findall(r'role="tool" tool="(\w+)" index="(\d)"<\|sep\|>(\w*)', text_of(messages))


def test_results_are_sorted_into_call_order():
    calls = [call("a", "f"), call("b", "g"), call("c", "h")]
    messages = turn(
        calls,
        {"tool_call_id": "c", "content": "3", "name": "stale"},
        {"id": "a", "content": "1"},
        {"tool_call_id": "b", "content": "2", "tool": "stale"},
    )
    assert results_of(messages) == [("f", "1", "1"), ("g", "2", "2"), ("h", "3", "3")]


def test_sorting_is_stable_and_ids_compare_as_strings():
    messages = turn(
        [call(1, "f"), call("2", "g")],
        {"tool_call_id": 2, "content": "x"},
        {"tool_call_id": "1", "content": "y"},
        {"tool_call_id": "2", "content": "z"},
    )
    assert results_of(messages) == [("f", "1", "y"), ("g", "2", "x"), ("g", "3", "z")]


def test_first_of_equal_call_ids_wins():
    messages = turn([call("a", "f"), call("a", "g")], {"tool_call_id": "a", "content": "x"})
    assert results_of(messages) == [("f", "1", "x")]


def test_a_run_with_an_unknown_id_stays():
    calls = [call("a", "f"), call("b", "g"), call(None, "h")]
    messages = turn(
        calls,
        {"tool_call_id": "b", "content": "2", "name": "kept"},
        {"tool_call_id": "zzz", "content": "x"},
        {"content": "y"},
    )
    assert results_of(messages) == [("kept", "1", "2"), ("g", "2", "x"), ("h", "3", "y")]


def test_missing_ids_match_nothing():
    for id in (None, "None"):
        messages = turn([call(id, "f"), call("b", "g")], {"content": "x", "name": "kept"})
        assert results_of(messages) == [("kept", "1", "x")]


def test_runs_are_sorted_apart_and_numbered_through():
    """A user message between results ends a run but not the numbering; the next assistant message restarts both."""
    messages = turn([call("a", "f"), call("b", "g")], {"tool_call_id": "b", "content": "2"})
    messages += [USER, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    messages += turn([call("a", "h")], {"tool_call_id": "a", "content": "3"})[1:]
    assert results_of(messages) == [("g", "1", "2"), ("f", "2", "1"), ("h", "1", "3")]


@pytest.mark.parametrize(
    "value, kind, text",
    [
        (True, "boolean", "true"),
        (1, "number", "1"),
        (1.5, "number", "1.5"),
        (None, "null", "null"),
        ("a\n<|sep|>", "string", "a\n<|sep|>"),
        ([1, "\u00e9"], "array", '[1, "\u00e9"]'),
        ({"b": 1, "a": {}}, "object", '{"b": 1, "a": {}}'),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_types_of_arguments(value, kind, text, as_json):
    arguments = {"k": value}
    rendered = text_of(turn([call("a", arguments=json.dumps(arguments) if as_json else arguments)]))
    assert f'<|open|>argument key="k" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>' in rendered


@pytest.mark.parametrize("arguments", [None, "", " \n", {}, "{}"])
def test_no_arguments(arguments):
    rendered = text_of(turn([call("a", arguments=arguments)]))
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call' in rendered


@pytest.mark.parametrize("arguments", ["{not json", "{} {}", '{"n": ' + "1" * 5000 + "}"])
def test_arguments_that_do_not_parse_stay_as_they_are(arguments):
    rendered = text_of(turn([call("a", arguments=arguments)]))
    assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>' in rendered


def test_attributes_are_escaped_once():
    name = '"><|sep|> & &amp; &quot;'
    segments = render([{**USER, "name": name}])
    assert Segment("&quot;><|sep|> &amp; &amp;amp; &amp;quot;") in segments


def test_call_without_function_object():
    rendered = text_of(turn([{"id": "a", "name": "f", "arguments": {"x": 1}}], {"tool_call_id": "a", "content": "r"}))
    assert 'call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"' in rendered
    assert 'role="tool" tool="f" index="1"<|sep|>r' in rendered


def test_reasoning_content_goes_before_reasoning():
    for given in ({"reasoning_content": "a", "reasoning": "b"}, {"reasoning_content": "", "reasoning": "a"}):
        segments = render([USER, {"role": "assistant", "content": "c", **given}])
        assert [s.text for s in segments].count("a") == 1 and Segment("b") not in segments


@pytest.mark.parametrize("shape", [lambda s: {"schema": s}, lambda s: {"json_schema": s}, lambda s: s])
def test_places_of_a_schema(shape):
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    compact = '{"properties":{"a":{},"b":{}},"type":"object"}\n```<|close|>'
    assert compact in text_of([USER], response_format={"type": "json_schema", "json_schema": shape(schema)})
    other = {"type": "json_schema", "json_schema": {"schema": {"x": 1}}}
    assert compact in text_of([USER], response_format=other, response_schema=schema)


def test_options_that_render_nothing():
    plain = text_of([USER])
    named = {"type": "function", "function": {"name": "f"}}
    for options in (
        {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": named}, {"response_format": {"type": "text"}},
        {"effort": "max"},  # text_of does not think
    ):  # fmt: skip
        assert text_of([USER], **options) == plain


def test_a_literal_slot_is_text(tokenizer):
    """Only an image part makes a slot, whatever users write."""
    parts = [{"type": "text", "text": IMAGE_SLOT}, {"type": "image", "image": "x"}]
    segments = render([{"role": "user", "content": parts}], image_sizes=[(28, 56)])
    assert Segment(IMAGE_SLOT) in segments
    assert Segment("<|media_begin|>image 28x56<|media_content|><|media_pad|><|media_end|>", True) in segments
    ids = tokenizer.encode_segments(segments)
    assert ids.count(tokenizer.special["<|media_pad|>"]) == 1


def test_images_in_order_over_messages():
    image = {"type": "image", "image": "x"}
    messages = [{"role": "user", "content": [image, image]}, {"role": "user", "content": [image]}]
    rendered = text_of(messages, image_sizes=[(1, 2), (3, 4), (5, 6)])
    assert re.findall(r"image (\d+x\d+)", rendered) == ["1x2", "3x4", "5x6"]


IMAGE = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
REFUSED = [
    ("hi", {}, "messages is 'hi', not a list of at least one message"),
    ([], {}, "messages is [], not a list of at least one message"),
    ({"role": "user"}, {}, "not a list of at least one message"),
    (["hi"], {}, "messages[0] is 'hi', not an object"),
    ([{"role": "developer", "content": "x"}], {}, "messages[0] has the role 'developer'; use one of system, user,"),
    ([{"content": "x"}], {}, "messages[0] has the role None"),
    ([{"role": ["user"], "content": "x"}], {}, "messages[0] has the role ['user']"),
    ([USER, {"role": "user"}], {}, "messages[1] has no content; give the user message a string"),
    ([{"role": "tool", "name": "f"}], {}, "messages[0] has no content; give the tool message a string"),
    ([{"role": "user", "content": 3}], {}, "messages[0].content is 3; pass a string or a list of parts"),
    ([{"role": "user", "content": ["x"]}], {}, "messages[0].content[0] is 'x', not an object"),
    ([{"role": "user", "content": [{"type": "audio"}]}], {}, "messages[0].content[0] is {'type': 'audio'}"),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        {},
        "messages[0].content[0] is {'type': 'text'}; give",
    ),
    ([{**USER, "name": 3}], {}, "messages[0].name is 3, not a string"),
    ([{"role": "assistant", "reasoning_content": ["x"]}], {}, "messages[0].reasoning_content is ['x'], not a string"),
    ([{"role": "assistant", "tool_calls": "x"}], {}, "messages[0].tool_calls is 'x', not a list"),
    (turn([{"id": "a"}]), {}, "messages[1].tool_calls[0] is {'id': 'a'}; give it a function with a name"),
    (turn([call("a", "")]), {}, "give it a function with a name"),
    (turn([None]), {}, "messages[1].tool_calls[0] is None"),
    (turn([call("a", arguments="[1]")]), {}, "tool call 1 (f) arguments are a JSON array, not an object"),
    (turn([call("a", arguments="3")]), {}, "tool call 1 (f) arguments are a JSON number, not an object"),
    (turn([call("a", arguments=[1])]), {}, "tool call 1 (f) arguments are a JSON array, not an object"),
    (turn([call("a", arguments="[" * 200_000)]), {}, "tool call 1 (f) arguments are nested too deeply"),
    (turn([call("a", arguments={"x": {1, 2}})]), {}, "tool call 1 (f) cannot be written as JSON"),
    (turn([], {"content": "r"}), {}, "tool message 1 after an assistant message with 0 calls answers none of them"),
    (turn([call("a")], {"content": "r"}, {"content": "s"}), {}, "tool message 2 after an assistant message with 1"),
    ([{"role": "system", "tools": {"type": "function"}}], {}, "messages[0].tools is {'type': 'function'}, not a list"),
    ([USER], {"tools": [None]}, "tools is [None], not a list of objects"),
    ([USER], {"tools": {"type": "function"}}, "tools is {'type': 'function'}, not a list of objects"),
    ([USER], {"tools": [{"x": object}]}, "tools cannot be written as JSON"),
    ([USER], {"effort": "medium"}, "effort is 'medium'; use one of low, high, max or None"),
    ([USER], {"effort": "medium", "thinking": False}, "effort is 'medium'"),
    ([USER], {"tool_choice": "bogus"}, "tool_choice is 'bogus'; use one of auto, required, none"),
    ([USER], {"response_format": "json_object"}, "response_format is 'json_object'; pass an object of type text,"),
    ([USER], {"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}; pass an object of type text,"),
    ([USER], {"response_format": {"type": "json_schema"}}, "response_format of type json_schema has no schema object"),
    (
        [USER],
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        "response_format of type json_schema has no schema object",
    ),
    (IMAGE, {"image_sizes": []}, "there are more image parts than image_sizes"),
    (IMAGE, {"image_sizes": [(1, 2), (3, 4)]}, "there are 2 image_sizes but fewer image parts"),
    (IMAGE, {"image_sizes": [(0, 2)]}, "image size (0, 2) is not (width, height) in pixels"),
    (IMAGE, {"image_sizes": [(1.5, 2)]}, "image size (1.5, 2) is not (width, height) in pixels"),
]


@pytest.mark.parametrize("messages, options, sentence", REFUSED)
def test_bad_input_is_refused(messages, options, sentence):
    with pytest.raises(ValueError) as error:
        render(messages, **options)
    assert str(error.value).startswith(sentence) or sentence in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_image_without_size_has_no_ids(tokenizer):
    with pytest.raises(ValueError, match="give image_sizes for images"):
        tokenizer.encode_chat(IMAGE)
