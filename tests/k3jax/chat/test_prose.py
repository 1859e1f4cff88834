import hashlib
import json
import warnings

import pytest

from k3jax.chat import Tokenizer, prose
from tests.k3jax.chat.folders import write_folder
from tests.k3jax.chat.test_encoding import GOLDEN, PLACEHOLDERS, golden_options

# Stand-ins for the released texts, with their shapes: headings, fences, and sentences with an option inside.
TEXTS = {
    "tools": "# A\nOne sentence.\n\n```json\n",
    "tools-dynamic": "## B\nLine one.\nLine two.\n\n```json\n",
    "effort:low": "How much.\nNow `e=low`.",
    "effort:high": "How much.\nNow `e=high`.",
    "effort:max": "How much.\nNow `e=max`.",
    "tool_choice:required": "With `c=required`.\nDo call.",
    "tool_choice:none": "With `c=none`.\nDo not call.",
    "response_format:json_object": "Raw \u00e9 {}.\nNothing else.",
    "response_format:json_schema": "Raw.\nThis schema:\n```json\n",
}
CONCATENATED = r'''
"""A module text."""
EFFORTS = {"low", "high", "max"}
def f(tools, effort, choice, schema):
    a = "# A\n" "One sentence.\n\n" f"```json\n{dump(tools)}\n```"
    b = ("## B\nLine one.\n" + "Line two.\n\n" + "```json\n" + dump(tools) + "\n```")
    c = "How much.\n" f"Now `e={effort}`."
    what = "call" if choice == "required" else "not call"
    d = choice in ("required", "none") and f"With `c={choice}`.\nDo {what}."
    e = "Raw \u00e9 {}.\n" "Nothing else."
    g = "\n".join(["Raw.", "This schema:", f"```json\n{schema}", "```"])
'''
CONSTANTS = r'''
HEAD = "# A"
TOOLS = f"{HEAD}\nOne sentence.\n\n```json\n%s\n```"
MORE = """
    ## B
    Line one.
    Line two.

    ```json
    {tools}
    ```
"""
EFFORT = "How much.\nNow `e={effort}`."
CHOICE = {"required": "With `c=required`.\nDo call.", "none": "With `c=none`.\nDo not call.\n"}
FORMATS = ("\nRaw \u00e9 {}.\nNothing else.\n", "Raw.\nThis schema:\n```json\n", "low", "high", "max")
'''


def digests(texts):
    return {name: (len(text.encode()), hashlib.sha256(text.encode()).hexdigest()) for name, text in texts.items()}


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(prose, "_warned", False)


def test_concatenated_strings_with_holes(tmp_path):
    source = tmp_path / "encoding_k3.py"
    source.write_text(CONCATENATED)
    assert prose.find_prose(source, digests(TEXTS)) == TEXTS


def test_constants_with_format_fields(tmp_path):
    source = tmp_path / "encoding_k3.py"
    source.write_text(CONSTANTS)
    assert prose.find_prose(source, digests(TEXTS)) == TEXTS


def test_released_sizes_are_those_of_the_specification():
    sizes = {"tools": 72, "tools-dynamic": 188, "tool_choice:required": 91, "tool_choice:none": 95}
    assert {name: prose.RELEASED[name][0] for name in sizes} == sizes
    assert set(prose.RELEASED) == set(prose.OWN_PROSE)


def test_nothing_is_executed(tmp_path):
    source = tmp_path / "encoding_k3.py"
    source.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\nX = 'text'\n")
    assert prose.find_prose(source, digests({"x": "text"})) == {"x": "text"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("record", [r for r in GOLDEN if "PROSE" in r["rendered"]], ids=lambda r: r["name"])
def test_released_renderings_through_the_file(tmp_path, monkeypatch, record):
    """A stand-in file with the placeholders of the golden renderings as its texts."""
    monkeypatch.setattr(prose, "RELEASED", digests(PLACEHOLDERS))
    folder = write_folder(tmp_path)
    (folder / "chat_prose.json").unlink()
    (folder / "encoding_k3.py").write_text(
        "\n".join(f"T{i} = {text!r}" for i, text in enumerate(PLACEHOLDERS.values()))
    )
    tokenizer = Tokenizer(folder)
    with warnings.catch_warnings(action="error"):
        ids = tokenizer.encode_chat(record["messages"], record["tools"], **golden_options(record))
    assert tokenizer.decode(ids) == record["rendered"]


def test_own_words_with_one_warning(tmp_path):
    with pytest.warns(UserWarning, match="encoding_k3.py is missing") as caught:
        assert prose.load_prose(tmp_path) == prose.OWN_PROSE
        assert prose.load_prose(tmp_path) == prose.OWN_PROSE
    assert len(caught) == 1


def test_texts_of_another_release(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "RELEASED", digests(TEXTS))
    (tmp_path / "encoding_k3.py").write_text("X = '# A\\nOne sentence.\\n\\n```json\\n'")
    with pytest.warns(UserWarning, match="no text with the known digest for tools-dynamic, effort:low"):
        texts = prose.load_prose(tmp_path)
    assert texts == {**prose.OWN_PROSE, "tools": TEXTS["tools"]}


def test_own_words_are_not_the_released_ones():
    assert not set(digests(prose.OWN_PROSE).values()) & set(prose.RELEASED.values())


def test_a_checkpoint_may_bring_its_texts(tmp_path):
    (tmp_path / "chat_prose.json").write_text(json.dumps(TEXTS))
    with warnings.catch_warnings(action="error"):
        assert prose.load_prose(tmp_path) == TEXTS


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("encoding_k3.py", "def f(:", "is not a Python file"),
        ("encoding_k3.py", "x = '\0'", "is not a Python file"),
        ("chat_prose.json", "{", "is not valid JSON"),
        ("chat_prose.json", "[]", "is not an object with the texts tools, tools-dynamic"),
        ("chat_prose.json", json.dumps({**TEXTS, "tools": 3}), "is not an object with the texts"),
        ("chat_prose.json", json.dumps({**TEXTS, "extra": "x"}), "is not an object with the texts"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        prose.load_prose(tmp_path)
