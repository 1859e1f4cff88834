"""What a training run carries from one step to the next."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import optax

from k3jax.checkpoint import load
from k3jax.init import init_params
from k3jax.params import Params
from train.config import Recipe, SftConfig
from train.export import unpacked


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32, steps done
    params: Params  # float32 masters, experts unpacked
    opt_state: optax.OptState


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with a clipped gradient, linear warm-up and a cosine to 0; decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, min(recipe.warmup, recipe.steps), recipe.steps + 1
    )
    adamw = optax.adamw(
        schedule,
        b2=recipe.beta2,
        weight_decay=recipe.weight_decay,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)


def init_state(config: SftConfig) -> TrainState:
    """Step 0: random weights from the config's seed, or those of the model in `init`."""
    params = _loaded(config) if config.init else init_params(config.model, jax.random.key(config.seed))
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return TrainState(step=jnp.int32(0), params=params, opt_state=make_optimizer(config.recipe).init(params))


def _loaded(config: SftConfig) -> Params:
    cfg, params = load(config.init, dtype=config.model.dtype)
    if dataclasses.replace(cfg, mxfp4_experts=False) != config.model:
        different = [
            field.name
            for field in dataclasses.fields(cfg)
            if field.name != "mxfp4_experts" and getattr(cfg, field.name) != getattr(config.model, field.name)
        ]
        raise ValueError(
            f"init {config.init} differs from [model] in {', '.join(different)}; copy the values of its config.json"
        )
    return unpacked(params)
