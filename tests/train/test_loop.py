"""Whole runs: one that is stopped and started again gives the same bytes as one that is not."""

import dataclasses
import json

import pytest

import k3jax
from train.loop import sft


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(config, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sft(dataclasses.replace(config, out=str(whole)))
    resumed = dataclasses.replace(config, out=str(parts))
    sft(resumed, stop_after=3)
    assert not (parts / "model" / "model.safetensors").exists()
    # as if killed one step later: its log line is there, its checkpoint is not
    with (parts / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 4, "loss": 0.0}) + "\n")
    sft(resumed)
    assert (whole / "model" / "model.safetensors").read_bytes() == (parts / "model" / "model.safetensors").read_bytes()
    assert lines(whole) == lines(parts)
    assert [line["step"] for line in lines(whole)] == [1, 2, 3, 4, 5]
    assert lines(whole)[-1]["loss"] < lines(whole)[0]["loss"]

    cfg, _ = k3jax.load(parts / "model")
    assert cfg.mxfp4_experts and cfg.eos_token_id == k3jax.load_tokenizer(parts / "model").stop_ids[0]

    with pytest.raises(ValueError, match="holds step 5, beyond the 4 steps asked for"):
        sft(dataclasses.replace(resumed, steps=4))
    wider = dataclasses.replace(config.model, intermediate_size=64)
    with pytest.raises(ValueError, match="checkpoint 5 in .* does not fit this config"):
        sft(dataclasses.replace(resumed, model=wider, steps=6))


def test_tokenizer_and_vocabulary_have_to_agree(config):
    model = dataclasses.replace(config.model, vocab_size=600)
    with pytest.raises(ValueError, match="has 576 ids, model.vocab_size is 600; make them equal"):
        sft(dataclasses.replace(config, model=model))
