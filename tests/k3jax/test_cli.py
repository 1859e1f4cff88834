"""The `k3jax` command: what it prints, and one sentence with exit status 2 for bad input."""

import io
import json
import shutil
import subprocess
import sys

import pytest

from k3jax.__main__ import main
from k3jax.presets import shipped_folder
from tests.conftest import DATA

GOLDEN = DATA / "golden" / "kimi_linear_tiny"


def run(capsys, *argv):
    status = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_generate_answers(capsys):
    assert run(capsys, "generate", "23+45=", "10+11=") == (0, "68\n21\n", "")
    assert run(capsys, "generate", "--no-thinking", "23+45=") == (0, "68\n", "")


def test_generate_shows_the_think_channel_and_says_when_it_was_cut(capsys):
    status, out, err = run(capsys, "generate", "--show-thinking", "23+45=")
    *thinking, answer = out.splitlines()
    assert status == 0 and answer == "68" and "".join(thinking).strip() and "\033" not in out
    status, out, err = run(capsys, "generate", "--max-new-tokens", 1, "23+45=")
    assert status == 0 and out == "\n" and "stopped after 1 tokens" in err


def test_generate_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("23+45="))
    assert run(capsys, "generate") == (0, "68\n", "")


def test_generate_from_ids_needs_no_tokenizer(capsys):
    assert not (GOLDEN / "tiktoken.model").exists()
    status, out, _ = run(capsys, "generate", "--model", GOLDEN, "--ids", "1,2 3", "--max-new-tokens", 5)
    assert status == 0 and len(out.split(",")) == 5 and all(0 <= int(i) < 512 for i in out.split(","))


def test_raw_continues_the_text(capsys):
    prompt = "<|open|>message"  # ordinary characters here, never control tokens
    status, out, _ = run(capsys, "generate", "--raw", prompt, "--max-new-tokens", 3)
    assert status == 0 and out.endswith("\n")


def test_chat_holds_a_conversation(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("23+45=\n\n/what\n/reset\n10+11=\n/exit\n1+1=\n"))
    status, out, err = run(capsys, "chat")
    assert status == 0 and err == ""
    answers = [line for line in out.splitlines() if line.endswith(("68", "21"))]
    assert len(answers) == 2 and out.count("/reset forgets") == 2


def test_chat_asks_for_tool_results(capsys, monkeypatch, tmp_path):
    tool = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
    (tmp_path / "tools.json").write_text(json.dumps([tool]))
    monkeypatch.setattr("sys.stdin", io.StringIO("37*48=\n1776\n"))
    status, out, _ = run(capsys, "chat", "--tools", tmp_path / "tools.json")
    assert status == 0
    assert 'calculator {"expression": "37*48"}' in out and out.rstrip().endswith("1776")


def test_chat_forgets_a_turn_that_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000 + "\n23+45=\n"))
    status, out, err = run(capsys, "chat")
    assert status == 0 and "the limit is" in err and out.rstrip().endswith("68")


@pytest.mark.parametrize("option", [["--pack"], ["--unpack"], ["--shard-size", "0.001"]])
def test_convert_writes_a_folder_that_loads(capsys, tmp_path, option):
    status, out, _ = run(capsys, "convert", "nano", tmp_path / "out", *option)
    assert status == 0 and "wrote" in out
    assert (tmp_path / "out" / "tiktoken.model").is_file()
    assert run(capsys, "generate", "--model", tmp_path / "out", "23+45=") == (0, "68\n", "")


def test_info_counts_k3_without_weights(capsys):
    status, out, _ = run(capsys, "info", "k3")
    assert status == 0
    for figure in ("497,220", "1,560,860,324,864", "2,779,931,837,184"):
        assert figure in out


def test_info_reads_a_folder_by_its_headers(capsys):
    status, out, _ = run(capsys, "info", "nano")
    assert status == 0 and "MXFP4 experts" in out and "layers" in out


def test_capacity_prints_and_plots(capsys, tmp_path):
    status, out, _ = run(capsys, "capacity", "--gpus", 32, "--lengths", 8192, "--plot", tmp_path / "c.png")
    assert status == 0 and "8,192" in out and "Longest single request" in out
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def zero_layers(folder):
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def lying_header(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes((len(whole) * 2).to_bytes(8, "little") + whole[8:])


FOLDERS = {
    "0 layers": (zero_layers, "num_hidden_layers"),
    "no weights": (no_weights, "has no *.safetensors weights"),
    "lying header": (lying_header, "truncated or not a safetensors file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
    "deep json": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "nests its JSON too deeply"),
    "no tokenizer": (lambda folder: (folder / "tiktoken.model").unlink(), "tiktoken.model"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_faulty_folders_get_one_sentence(capsys, tmp_path, fault):
    change, message = FOLDERS[fault]
    shutil.copytree(shipped_folder("nano"), tmp_path / "model")
    change(tmp_path / "model")
    status, out, err = run(capsys, "generate", "--model", tmp_path / "model", "23+45=")
    assert status == 2 and out == "" and message in err
    assert err.count("\n") == 1 and "Traceback" not in err


CALLS = {
    "empty prompt": (["generate", " "], "prompt 0 is empty"),
    "id out of range": (["generate", "--ids", "1,1024"], "token id 1024, the vocabulary is 0..1023"),
    "not ids": (["generate", "--ids", "1,a"], "'1,a' is not a list of token ids"),
    "too long": (["generate", "x" * 5000], "the limit is 4096 together"),
    "temperature": (["generate", "--temperature", "-1", "1+1="], "temperature is -1.0"),
    "unknown model": (["generate", "--model", "no-such", "1+1="], "no-such is not a folder, a preset"),
    "no weights here": (["generate", "--model", "k3", "1+1="], "preset 'k3' has a config but no weights"),
    "tools": (["chat", "--tools", __file__], "is not a JSON list of tools"),
    "info": (["info", "no-such"], "no-such is not a folder, a preset"),
    "target exists": (["convert", "nano", "."], "exists and is not an empty folder"),
    "seed": (["generate", "--seed", "99999999999999999999", "1+1="], "seed is 99999999999999999999"),
    "chat option": (["chat", "--temperature", "nan"], "temperature is nan"),
    "no such home": (["info", "~no-such-user/x"], "is not a folder, a preset"),
    "no name": (["info", ""], "is not a folder, a preset"),
    "shards": (["convert", "nano", "x", "--shard-size", "inf"], "--shard-size is inf"),
    "memory": (["capacity", "--gpu-memory", "nan"], "--gpu-memory is nan"),
    "workspace": (["capacity", "--workspace", "-1000"], "--workspace is -1000.0"),
    "length": (["capacity", "--lengths", "2097153"], "allowed is 1 to 1048576 tokens"),
    "capacity": (["capacity", "--gpus", "9", "--tp", "8"], "tp 8 does not divide 9 GPUs"),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_get_one_sentence(capsys, case):
    argv, message = CALLS[case]
    status, out, err = run(capsys, *argv)
    assert status == 2 and message in err and err.startswith(f"k3jax {argv[0]}: ")
    assert err.count("\n") == 1 and "Traceback" not in err


def test_debug_shows_the_traceback(capsys):
    for argv in (["--debug", "generate", ""], ["generate", "--debug", ""]):
        status, _, err = run(capsys, *argv)
        assert status == 2 and "Traceback" in err


def test_the_process_exits_with_the_status():
    done = subprocess.run([sys.executable, "-m", "k3jax", "generate", ""], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stderr == "k3jax generate: prompt 0 is empty, the minimum is 1 token; give some text\n"
    )
    done = subprocess.run([sys.executable, "-m", "k3jax", "info", "tiny"], capture_output=True, text=True)
    assert done.returncode == 0 and "layers" in done.stdout
