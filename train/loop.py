"""The training loop: batches in, steps, a log, checkpoints, and the exported model at the end.

A run that is killed and started again continues from its last checkpoint and gives the same weights bit for bit: data
depends on (seed, step) only, and the checkpoint holds everything else.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from k3jax.chat.prose import OWN_PROSE
from k3jax.chat.tokenizer import Tokenizer
from k3jax.checkpoint import resolve
from train.bpe import train_bpe, write_tokenizer
from train.config import SftConfig
from train.conversations import texts
from train.data import Batch, batches
from train.export import export
from train.state import TrainState, init_state
from train.step import train_step

SPECIAL_COUNT = 256  # ids after the ordinary ones
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "generation_config.json", "chat_prose.json")


def sft(config: SftConfig, *, stop_after: int | None = None) -> Path:
    """Train to the config's last step and return the folder of the exported model, `out`/model.

    Continues from the newest checkpoint in `out`. `stop_after` ends the run at that step as if it was killed there
    after saving; nothing is exported then.
    """
    out = Path(config.out).resolve()
    tokenizer = _tokenizer(config, out / "model")
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=False)
    with ocp.CheckpointManager(out / "checkpoints", options=options) as manager:
        state = _restore(config, manager)
        first = int(state.step)
        last = config.steps if stop_after is None else min(stop_after, config.steps)
        with _Log(out / "log.jsonl", config, first) as log:
            for step, batch in zip(range(first, last), batches(config, tokenizer, first), strict=False):
                state, metrics = train_step(config.model, config.recipe, state, _arrays(batch))
                log.step(step + 1, metrics, int(batch.lengths.sum()))
                if (step + 1) % config.save_every == 0 or step + 1 == last:
                    manager.save(step + 1, args=ocp.args.StandardSave(state))
    if last == config.steps:
        export(out / "model", config.model, state.params)
    return out / "model"


def _arrays(batch: Batch) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in vars(batch).items()}


def _restore(config: SftConfig, manager: ocp.CheckpointManager) -> TrainState:
    step = manager.latest_step()
    if step is None:
        return init_state(config)
    if step > config.steps:
        raise ValueError(
            f"{manager.directory} holds step {step}, beyond the {config.steps} steps asked for;"
            " raise steps or use another out"
        )
    target = jax.eval_shape(lambda: init_state(config))
    try:
        return manager.restore(step, args=ocp.args.StandardRestore(target))
    except (ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"checkpoint {step} in {manager.directory} does not fit this config ({reason}); use another out"
        ) from None


def _tokenizer(config: SftConfig, folder: Path) -> Tokenizer:
    """The tokenizer files in the model's folder: learnt from the tasks, or copied from the config's tokenizer."""
    if config.tokenizer == "train":
        ranks = config.model.vocab_size - SPECIAL_COUNT
        if not (folder / "tiktoken.model").is_file():
            tokens = train_bpe(texts(config.seed, dict(config.tasks), config.thinking), ranks)
            write_tokenizer(folder, tokens, config.model.max_position_embeddings)
    else:
        source = resolve(config.tokenizer, weights=False)
        folder.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                (folder / name).write_bytes((source / name).read_bytes())
        if not (folder / "chat_prose.json").is_file():
            (folder / "chat_prose.json").write_text(json.dumps(dict(OWN_PROSE), indent=2) + "\n", encoding="utf-8")
    tokenizer = Tokenizer(folder)
    if not tokenizer.xtml:
        raise ValueError(f"tokenizer {config.tokenizer} has no K3 chat encoding; use a tokenizer of a K3 checkpoint")
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids, model.vocab_size is"
            f" {config.model.vocab_size}; make them equal"
        )
    return tokenizer


class _Log:
    """One JSON line per `log_every` steps in a file, and a progress bar on a terminal or a plain line elsewhere."""

    def __init__(self, path: Path, config: SftConfig, first: int):
        self.path, self.config = path, config
        self.lines = self._kept(first)
        self.bar = tqdm(total=config.steps, initial=first, unit="step") if sys.stderr.isatty() else None
        self.tokens = 0
        self.since = time.perf_counter()

    def __enter__(self) -> "_Log":
        self.file = self.path.open("w", encoding="utf-8")
        self.file.writelines(self.lines)
        return self

    def __exit__(self, *exc: Any) -> None:
        self.file.close()
        if self.bar is not None:
            self.bar.close()

    def step(self, step: int, metrics: dict[str, jax.Array], tokens: int) -> None:
        self.tokens += tokens
        if self.bar is not None:
            self.bar.update()
        if step % self.config.log_every:
            return
        values = {name: round(float(np.asarray(value)), 5) for name, value in metrics.items()}
        now = time.perf_counter()
        rate = self.tokens / (now - self.since)
        self.tokens, self.since = 0, now
        print(json.dumps({"step": step, **values}), file=self.file, flush=True)
        shown = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self.bar is not None:
            self.bar.set_postfix_str(shown)
        else:
            print(f"step {step}/{self.config.steps} {shown} tokens/s {rate:.0f}", file=sys.stderr, flush=True)

    def _kept(self, first: int) -> list[str]:
        """Lines of an earlier run up to the checkpoint that this one continues from."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if json.loads(line)["step"] <= first]
