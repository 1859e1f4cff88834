"""The shipped checkpoint: small, complete, and right about problems that it was never trained on."""

import json
from pathlib import Path

import pytest

import k3jax
from k3jax.config import read_config
from train.__main__ import main
from train.config import read_sft_config
from train.evaluate import read, score
from train.tasks import problems

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k3jax" / "data" / "nano"


@pytest.fixture(scope="module")
def nano():
    return *k3jax.load("nano"), k3jax.load_tokenizer("nano")


def test_folder_is_small_and_complete():
    names = {path.name for path in FOLDER.iterdir()}
    tokenizer_files = {"tiktoken.model", "tokenizer_config.json", "generation_config.json", "chat_prose.json"}
    assert names == {"config.json", "model.safetensors", *tokenizer_files}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8_000_000


def test_it_is_what_the_shipped_configs_train(nano):
    cfg, params, tokenizer = nano
    assert cfg.mxfp4_experts
    stored = read_config(FOLDER)
    for name in ("nano", "nano_polish"):
        model = read_sft_config(ROOT / "train" / "configs" / f"{name}.toml").model
        assert json.dumps(model.to_hf()["text_config"]) == json.dumps(
            {key: value for key, value in stored.to_hf()["text_config"].items() if key != "quantization_config"}
        )
    assert tokenizer.vocab_size == cfg.vocab_size == 1024
    assert tokenizer.special["[BOS]"] == 768 and tokenizer.stop_ids[0] == cfg.eos_token_id == 770
    assert all(len(tokenizer.encode(f"{n}")) == len(f"{n}") for n in (7, 42, 1234567))


def test_held_out_sums_are_right(nano):
    """40 sums of up to two digits, none of them trained on: at least 36 right; 256 gave more than 99 %."""
    result = score(*nano, "add2", n=40, thinking=True)
    assert result.n == 40 and result.right >= 36


def test_it_stops_by_itself_in_both_modes(nano):
    cfg, params, tokenizer = nano
    asked = problems("add2", 39, seed=4, held_out=True)
    for thinking in (True, False):
        chats = [[{"role": "user", "content": "23+45="}], *([p.question()] for p in asked)]
        prompts = [tokenizer.encode_chat(chat, thinking=thinking) for chat in chats]
        out = k3jax.generate(cfg, params, prompts, max_new_tokens=128)
        assert out.finish_reasons == ["stop"] * 40
        assert read(tokenizer, out.tokens[0], "stop", thinking).content == "68"


@pytest.mark.slow
def test_eval_command_prints_a_table(capsys):
    assert main(["eval", "nano", "--task", "tool", "--task", "compare", "-n", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["task", "mode"], ["tool", "thinking"], ["tool", "direct"], ["compare", "thinking"], ["compare", "direct"],
    ]  # fmt: skip
    assert all(int(line.split()[2].split("/")[0]) >= 7 for line in lines[1:])


def test_bad_input_is_one_sentence_and_status_2(capsys):
    for argv, message in (
        (["eval", "nano", "-n", "0"], "k3jax-train eval: -n is 0, the minimum is 1; ask for at least one problem\n"),
        (["sft", "none.toml"], "k3jax-train sft: none.toml does not exist; give a TOML file such as"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith(message) and error.count("\n") == 1
    assert main(["sft", "none.toml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
