"""TOML to config: the shipped file, and a refusal by name for each kind of mistake."""

from pathlib import Path

import pytest

from k3jax.config import ConfigError
from train.config import describe_options, read_sft_config

NANO = Path(__file__).parents[2] / "train" / "configs" / "nano.toml"


def test_shipped_config_has_every_mechanism_of_k3():
    config = read_sft_config(NANO)
    model = config.model
    assert set(model.layer_types) == {"kda", "mla"} and model.layer_types[-1] == "mla"
    assert model.use_full_rank_gate and model.gate_lower_bound == -5.0 and model.mla_use_output_gate
    assert model.attn_res_block_size and model.latent_moe_use_norm and model.hidden_act == "situ"
    assert model.num_shared_experts >= 1 and model.q_lora_rank and model.multimodal_wrapper
    assert dict(config.tasks)["add2"] > 0


def test_overrides_replace_only_what_is_given():
    config = read_sft_config(NANO, steps=3, seed=None, out="elsewhere")
    assert (config.steps, config.seed, config.out) == (3, 0, "elsewhere")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("seed = 0", "sede = 0", "unknown option 'sede'"),
        ("seed = 0", "seed = -1", "seed is -1, allowed is at least 0"),
        ("seed = 0", 'seed = "a"', "seed is 'a', expected int"),
        ("seed = 0", "thinking = 1.5", "thinking is 1.5, allowed is 0 to 1"),
        ("seed = 0", "thinking = true", "thinking is True, expected float"),
        ("steps = 7000", "steps = 0", "steps is 0, allowed is at least 1"),
        ("widths = [64,", "widths = [640,", "widths are .* give ascending widths"),
        ("tokens = 24576", "tokens = 100", "largest width 576 exceeds tokens 100"),
        ("add2 = ", "add9 = ", "unknown task 'add9'"),
        ("add2 = 1.5", "add2 = -1", "tasks.add2 is -1"),
        ("hidden_size = 192", "hiden_size = 192", "unknown model option 'hiden_size'"),
        ("\nhidden_size = 192", "", "lacks model.hidden_size"),
        ("kv_lora_rank = 64", "kv_lora_rank = 0", "kv_lora_rank is 0, the minimum is 1"),
        ("vocab_size = 1024", "vocab_size = 1024\nmxfp4_experts = true", "leave both out"),
        ("[model]", "[modell]", "unknown option 'modell'"),
        ("seed = 0", "seed = ", "is not valid TOML"),
    ],
)
def test_mistakes_are_refused_by_name(tmp_path, old, new, message):
    text = NANO.read_text()
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_sft_config(path)


def test_missing_file_and_missing_model(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; give a TOML file"):
        read_sft_config(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("seed = 1\n")
    with pytest.raises(ConfigError, match=r"has no table \[model\]"):
        read_sft_config(tmp_path / "empty.toml")


def test_help_names_every_option_of_the_shipped_file():
    text = describe_options()
    for line in NANO.read_text().split("[tasks]")[0].splitlines():
        if "=" in line and not line.startswith("#"):
            assert f"  {line.split('=')[0].strip()} " in text
