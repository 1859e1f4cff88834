"""Config parsing: presets, round trips, and one refusal per contradiction."""

import copy
import json

import pytest

from k3jax.config import ConfigError, K3Config, read_config
from k3jax.presets import K3, KIMI_LINEAR_48B, MINI, PRESETS, TINY, TINY48, preset
from k3jax.sizes import (
    conv_bytes_per_request,
    kv_bytes_per_token,
    recurrent_bytes_per_request,
    sizes,
)


def hf(golden, name="k3_tiny/config_mxfp4.json"):
    return json.loads((golden / name).read_text())


def test_released_configs_parse_to_the_presets(golden):
    assert K3Config.from_hf(hf(golden, "k3_tiny/config.json")) == TINY
    packed = K3Config.from_hf(hf(golden))
    assert packed.mxfp4_experts and not TINY.mxfp4_experts
    small = K3Config.from_hf(hf(golden, "kimi_linear_tiny/config.json"))
    assert small.layer_types == ("kda", "kda", "kda", "mla", "kda")
    assert (small.gate_lower_bound, small.attn_res_block_size, small.q_lora_rank) == (
        None,
        None,
        None,
    )
    assert small.kda_width == 48 and small.expert_width == 64


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips(name):
    assert K3Config.from_hf(json.loads(json.dumps(preset(name).to_hf()))) == preset(name)


def test_layer_lists_are_one_based():
    assert K3.mla_layers == (*range(3, 92, 4), 92) and len(K3.kda_layers) == 69
    assert KIMI_LINEAR_48B.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert MINI.mla_layers == (3, 7, 11, 12)


def test_k3_sizes_equal_the_published_checkpoint():
    size = sizes(K3)
    assert size.tensors == 497_220
    assert size.nbytes == 1_560_860_324_864
    assert size.parameters == 2_779_931_837_184
    assert size.text_parameters == 2_779_484_478_208
    assert size.active_parameters == 105_364_019_968
    assert size.active_without_embedding == 104_189_614_848
    assert size.bytes_by_kind["MXFP4 experts"] == 1_446_456_066_048
    assert size.parameters_by_part["KDA"] == 69 * 443_740_416
    assert size.parameters_by_part["MLA"] == 24 * 232_196_096


def test_other_sizes():
    assert sizes(KIMI_LINEAR_48B).parameters == 49_122_681_728
    assert sizes(MINI).parameters == 36_020_570_112
    assert (sizes(TINY).parameters, sizes(TINY).text_parameters) == (404_640, 338_496)
    assert kv_bytes_per_token(K3) == 27_648 and kv_bytes_per_token(KIMI_LINEAR_48B) == 8_064
    assert recurrent_bytes_per_request(K3) == 434_110_464
    assert conv_bytes_per_request(K3) == 15_261_696
    assert recurrent_bytes_per_request(KIMI_LINEAR_48B) == 41_943_040
    assert conv_bytes_per_request(KIMI_LINEAR_48B) == 1_474_560


def linear(**changes):
    return lambda c: c["text_config"]["linear_attn_config"].update(changes)


def text(**changes):
    return lambda c: c["text_config"].update(changes)


CONTRADICTIONS = {
    "no layers": (text(num_hidden_layers=0), "num_hidden_layers is 0"),
    "text for a size": (text(vocab_size="64"), "vocab_size is '64'"),
    "text for a number": (text(rms_norm_eps="small"), "rms_norm_eps is 'small'"),
    "zero-based list": (
        linear(kda_layers=[0, 1, 2], full_attn_layers=[3, 4]),
        "kda_layers contains 0",
    ),
    "in both lists": (linear(kda_layers=[1, 2, 3, 4]), r"layers \[4\] stand in both"),
    "in no list": (linear(kda_layers=[1, 2]), r"layers \[3\]"),
    "positive decay": (linear(gate_lower_bound=5.0), "gate_lower_bound is 5.0"),
    "rotary": (text(mla_use_nope=False), "mla_use_nope is False"),
    "softmax router": (text(moe_router_activation_func="softmax"), "moe_router_activation_func"),
    "grouped experts": (text(num_expert_group=8), "num_expert_group is 8"),
    "tied head": (text(tie_word_embeddings=True), "tie_word_embeddings"),
    "draft layers": (text(num_nextn_predict_layers=1), "num_nextn_predict_layers is 1"),
    "kv heads": (text(num_key_value_heads=2), "num_key_value_heads 2 differs"),
    "activation": (text(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "too many active": (
        text(num_experts_per_token=9),
        "num_experts_per_token 9 exceeds num_experts 8",
    ),
    "norm without latent": (text(routed_expert_hidden_size=None), "latent_moe_use_norm"),
    "block of 32": (text(moe_intermediate_size=48), "moe_intermediate_size 48 is not a multiple"),
    "token id": (text(eos_token_id=512), "eos_token_id 512"),
    "quantization": (
        lambda c: c["text_config"]["quantization_config"].update(format="int4"),
        "quantization format is 'int4'",
    ),
    "two quantizations": (lambda c: c.update(quantization_config={"format": "x"}), "differ"),
    "missing key": (lambda c: c["text_config"].pop("kv_lora_rank"), "config lacks kv_lora_rank"),
    "other family": (lambda c: c.update(model_type="llama"), "model_type is 'llama'"),
    "vision width": (
        lambda c: c["vision_config"].update(text_hidden_size=32),
        "text_hidden_size 32",
    ),
    "vision size": (
        lambda c: c["vision_config"].update(vt_num_hidden_layers=0),
        "vt_num_hidden_layers is 0",
    ),
    "text config": (lambda c: c.update(text_config=[]), "text_config"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused_by_name(golden, case):
    change, message = CONTRADICTIONS[case]
    config = copy.deepcopy(hf(golden))
    change(config)
    with pytest.raises(ConfigError, match=message) as error:
        K3Config.from_hf(config)
    assert "\n" not in str(error.value)


def test_truncated_config_keeps_the_layers_it_has(golden):
    config = hf(golden)
    config["text_config"]["num_hidden_layers"] = 4
    assert K3Config.from_hf(config).layer_types == ("kda", "kda", "kda", "mla")


def test_unreadable_config(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is a list"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="unknown preset 'k4'"):
        preset("k4")


def test_48b_defaults_differ_from_k3():
    assert TINY48.hidden_act == "silu" and TINY48.routed_scaling_factor == 2.446
    assert K3Config.from_hf(TINY48.to_hf()) == TINY48


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("moe_renormalize", "false", "moe_renormalize is 'false', supported are true and false"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps is inf"),
        ("routed_scaling_factor", 10**400, "routed_scaling_factor is 1000"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0"),
        ("max_position_embeddings", 10**30, "the maximum is 2147483647"),
        ("first_k_dense_replace", True, "first_k_dense_replace is True"),
        ("eos_token_id", True, "eos_token_id True is outside"),
        ("num_experts", 10**30, "the maximum is 100000"),
        ("num_hidden_layers", 10**9, "allowed is 1 to 10000"),
        ("hidden_act", None, "activation_situ_beta is set without hidden_act"),
        ("quantization_config", "x", "quantization_config is 'x', expected a JSON object"),
        ("quantization_config", {"format": "mxfp4-pack-quantized", "config_groups": [1]}, "config_groups is"),
    ],
)
def test_absurd_values_are_refused_by_name(golden, key, value, message):
    config = hf(golden)
    config["text_config"][key] = value
    with pytest.raises(ConfigError, match=message) as error:
        K3Config.from_hf(config)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_null_inside_leaves_the_value_outside(golden):
    config = hf(golden)
    expected = K3Config.from_hf(config).eos_token_id
    config["text_config"]["eos_token_id"] = None
    config["eos_token_id"] = expected
    assert expected is not None and K3Config.from_hf(config).eos_token_id == expected
