"""`python -m train.see`: train a small model that sees on generated pictures, and measure it on held-out ones.

The objective is cross-entropy on the answers, plus that of a linear head, dropped afterwards, which says for each image
token how many shapes have their centre there.
"""

import argparse
import collections
import dataclasses
import functools
import io
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

from k3jax.cache import init_cache
from k3jax.chat import Tokenizer, load_tokenizer
from k3jax.checkpoint import load, resolve
from k3jax.config import K3Config, VisionConfig
from k3jax.decode import generate
from k3jax.init import init_params
from k3jax.model import logits_of, step
from k3jax.params import Params
from k3jax.rows import rectangle
from k3jax.vision import Media, embed_packed, embed_pictures, encode_chat, read_picture
from train.evaluate import read
from train.export import export
from train.loop import TOKENIZER_FILES
from train.pictures import MOST_SHAPES, Scene, image, questions, scene
from train.see_data import centres, make_batch, pack_scene
from train.step import balance, stored

NANO_VL = K3Config(
    vocab_size=1024,
    hidden_size=128,
    num_hidden_layers=4,
    layer_types=("kda", "mla", "kda", "mla"),
    intermediate_size=256,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    mla_use_output_gate=True,
    kda_num_heads=4,
    kda_head_dim=32,
    use_full_rank_gate=True,
    gate_lower_bound=-5.0,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=64,
    latent_moe_use_norm=True,
    attn_res_block_size=2,
    max_position_embeddings=2048,
    bos_token_id=768,
    eos_token_id=770,
    pad_token_id=1023,
    media_placeholder_token_id=789,
    vision=VisionConfig(
        vt_hidden_size=96,
        vt_num_hidden_layers=3,
        vt_num_attention_heads=3,
        qkv_hidden_size=96,
        vt_intermediate_size=256,
        init_pos_emb_height=16,
        init_pos_emb_width=16,
        mm_hidden_size=96,
    ),
    multimodal_wrapper=True,
)


def _option(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class SeeConfig:
    out: str = _option("runs/nano-vl", "checkpoint folder to write")
    seed: int = _option(0, "of the weights and the data")
    steps: int = _option(8000, "optimizer steps")
    seconds: float = _option(math.inf, "end by then at the latest; the schedule follows the clock where it is faster")
    batch: int = _option(128, "pictures of a step, one question each")
    learning_rate: float = _option(2e-3, "peak, after a linear warm-up and before a cosine to 0")
    warmup: int = _option(200, "steps of the warm-up")
    weight_decay: float = _option(0.05, "of the matrices")
    bias_rate: float = _option(1e-3, "step of the router bias towards equal load")
    centres: float = _option(0.5, "weight of the loss of the head that marks centres")
    workers: int = _option(4, "processes that make batches")
    log_every: int = _option(100, "steps between two lines of the log")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: Params  # float32 masters
    head: jax.Array  # [D, MOST_SHAPES + 1] float32
    opt: Any


def _optimizer(config: SeeConfig) -> optax.GradientTransformation:
    """Without the learning rate, which each step is given."""
    matrices = lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
    )


def init_state(cfg: K3Config, config: SeeConfig) -> State:
    params = jax.tree.map(lambda p: p.astype(jnp.float32), init_params(cfg, jax.random.key(config.seed)))
    head = jnp.zeros((cfg.hidden_size, MOST_SHAPES + 1), jnp.float32)
    return State(params=params, head=head, opt=_optimizer(config).init((params, head)))


def loss(cfg: K3Config, weight: float, trained: tuple[Params, jax.Array], batch: dict[str, jax.Array]) -> Any:
    """(answer loss + weight * centre loss in nats, (metrics, expert loads [MoE layers, E]))."""
    masters, head = trained
    params = stored(cfg, masters)
    assert params.vision is not None
    scenes = {name: batch[name] for name in ("size", "ground", "rgb", "kind", "shapes")}
    seen = jax.vmap(functools.partial(embed_packed, cfg, params.vision))(jax.vmap(pack_scene)(scenes))  # [R, tokens, D]
    R, W = batch["tokens"].shape
    at = batch["image"]
    media = Media(
        rows=jnp.take_along_axis(seen, jnp.maximum(at, 0)[..., None], axis=1).reshape(R * W, -1),
        present=(at >= 0).reshape(-1),
    )
    taps: dict[str, jax.Array] = {}
    rows = rectangle(batch["lengths"], W)
    hidden, _ = step(cfg, params, batch["tokens"].reshape(-1), rows, init_cache(cfg, R, W), taps, media)
    logits, labels, targets = logits_of(params, hidden), batch["labels"].reshape(-1), batch["targets"].reshape(-1)
    answer = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (jnp.argmax(logits, axis=-1) == labels) | ~targets
    counts, used = jax.vmap(centres)(scenes)
    centre = optax.softmax_cross_entropy_with_integer_labels(seen.astype(jnp.float32) @ head, counts)
    answer_loss, centre_loss = jnp.mean(answer, where=targets), jnp.mean(centre, where=used)
    metrics = {"loss": answer_loss, "centres": centre_loss, "right": jnp.mean(right.reshape(R, W).all(1))}
    valid = rows.valid.reshape(-1)
    routed = [taps[f"layers.{i}.router_ids"] for i in range(cfg.num_hidden_layers) if cfg.is_moe(i)]
    loads = [jnp.zeros(cfg.num_experts).at[ids].add(valid[:, None].astype(jnp.float32)) for ids in routed]
    return answer_loss + weight * centre_loss, (metrics, jnp.stack([load / load.sum() for load in loads]))


@functools.partial(jax.jit, static_argnames=("cfg", "config"), donate_argnames=("state",))
def train_step(
    cfg: K3Config, config: SeeConfig, state: State, batch: dict[str, jax.Array], rate: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """One step at learning rate `rate`; donates `state`. `right` is the share of rows whose every target is right."""
    trained = (state.params, state.head)
    grad = jax.grad(functools.partial(loss, cfg, config.centres), has_aux=True)
    grads, (metrics, loads) = grad(trained, batch)
    updates, opt = _optimizer(config).update(grads, state.opt, trained)
    params, head = optax.apply_updates(trained, jax.tree.map(lambda u: -rate * u, updates))
    return State(params=balance(cfg, params, loads, config.bias_rate), head=head, opt=opt), metrics


def train(config: SeeConfig, cfg: K3Config = NANO_VL) -> Path:
    """Train, write the checkpoint folder `out` and return it."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    source = resolve("nano", weights=False)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((source / name).read_bytes())
    state = init_state(cfg, config)
    start = begin = time.perf_counter()
    metrics: dict[str, jax.Array] = {}
    for i, batch in enumerate(_batches(config, source)):
        jax.block_until_ready(metrics)  # the host stays one step ahead, so that the clock tells the truth
        if i == 2:  # the steps before wait for the compiler
            begin = time.perf_counter()
        done = max(i / config.steps, (time.perf_counter() - begin) / (start + config.seconds - begin))
        if done >= 1:
            break
        rate = config.learning_rate * min(1, (i + 1) / config.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        state, metrics = train_step(cfg, config, state, batch, jnp.float32(rate))
        if (i + 1) % config.log_every == 0:
            shown = " ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
            seconds = time.perf_counter() - start
            print(f"step {i + 1} ({done:.0%}, {seconds:.0f} s) {shown}", file=sys.stderr, flush=True)
    export(folder, cfg, state.params)
    return folder


def _batches(config: SeeConfig, source: Path) -> Iterator[dict[str, np.ndarray]]:
    make = functools.partial(make_batch, str(source), config.seed, config.batch)
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        ahead = collections.deque(pool.submit(make, i) for i in range(4 * config.workers))
        try:
            for i in range(config.steps):
                yield ahead.popleft().result()
                ahead.append(pool.submit(make, i + 4 * config.workers))
        finally:
            for future in ahead:
                future.cancel()


@dataclasses.dataclass(frozen=True)
class Score:
    n: int
    colour: int
    count: int
    both: int  # pictures whose colour and count are right


def score(cfg: K3Config, params: Params, tokenizer: Tokenizer, n: int, seed: int = 0, batch: int = 64) -> Score:
    """Greedy answers about n held-out pictures, read as PNG files, in non-thinking mode."""
    scenes = [scene(random.Random(f"held out {seed} {i}")) for i in range(n)]
    right: list[tuple[bool, bool]] = []
    for at in range(0, n, batch):
        part = scenes[at : at + batch]
        pictures = [read_picture(_png(one)) for one in part]
        images = [[rows] for rows in embed_pictures(cfg, params, pictures)]
        flags = []
        for which in (0, 1):  # colour, count
            asked = [questions(one)[which] for one in part]
            prompts = [
                encode_chat(cfg, tokenizer, [_ask(question.text)], [picture], thinking=False)
                for question, picture in zip(asked, pictures, strict=True)
            ]
            out = generate(cfg, params, prompts, max_new_tokens=24, stop_ids=tokenizer.stop_ids, images=images)
            answers = [read(tokenizer, *pair, False) for pair in zip(out.tokens, out.finish_reasons, strict=True)]
            flags.append([a.content == question.answer for a, question in zip(answers, asked, strict=True)])
        right += zip(*flags, strict=True)
    return Score(n, sum(a for a, _ in right), sum(b for _, b in right), sum(a and b for a, b in right))


def _ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}


def _png(one: Scene) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image(one)).save(out, "PNG")
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.see", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    formatter = argparse.ArgumentDefaultsHelpFormatter
    fit = commands.add_parser("train", help="train and write a checkpoint folder", formatter_class=formatter)
    for field in dataclasses.fields(SeeConfig):
        name, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        fit.add_argument(name, type=kind, default=field.default, help=field.metadata["help"])
    ask = commands.add_parser("eval", help="accuracy on held-out pictures", formatter_class=formatter)
    ask.add_argument("model", help="checkpoint folder")
    ask.add_argument("-n", type=int, default=500, help="pictures")
    ask.add_argument("--seed", type=int, default=0, help="which pictures")
    args = vars(parser.parse_args(argv))
    if args.pop("command") == "train":
        print(train(SeeConfig(**args)))
        return 0
    tokenizer = load_tokenizer(args["model"])
    result = score(*load(args["model"]), tokenizer, args["n"], args["seed"])
    for name in ("colour", "count", "both"):
        right = getattr(result, name)
        print(f"{name:<8}{right}/{result.n}  {right / result.n:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
