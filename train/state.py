"""What a training run carries from one step to the next."""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from k3jax.init import init_params
from k3jax.params import Params
from train.config import SftConfig


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32, steps done
    params: Params  # float32 masters, experts unpacked
    opt_state: optax.OptState


def make_optimizer(config: SftConfig) -> optax.GradientTransformation:
    """AdamW with a clipped gradient, linear warm-up and a cosine to 0; decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, min(config.warmup, config.steps), config.steps + 1
    )
    adamw = optax.adamw(
        schedule,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def init_state(config: SftConfig) -> TrainState:
    """Step 0, from the config's seed alone."""
    params = init_params(config.model, jax.random.key(config.seed))
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return TrainState(step=jnp.int32(0), params=params, opt_state=make_optimizer(config).init(params))
