"""Options of supervised training, read from a TOML file into a frozen dataclass; every bad value is refused by name."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError, K3Config
from train.tasks import TASKS


def _option(default: Any, help: str, least: float | None = None, most: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a compiled step depends on besides the model; fields as in SftConfig."""

    steps: int
    learning_rate: float
    warmup: int
    weight_decay: float
    beta2: float
    clip: float
    bias_rate: float


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """`model` comes from the table [model], whose keys are the fields of K3Config, and `tasks` from [tasks]."""

    model: K3Config
    out: str = _option("runs/sft", "folder for checkpoints, the log and the exported model")
    tokenizer: str = _option("train", "tokenizer folder or preset; 'train' learns one from the tasks")
    init: str = _option("", "model folder or preset whose weights to start from; empty starts from random ones")
    seed: int = _option(0, "of the initial weights and the data", 0)
    steps: int = _option(1000, "optimizer steps", 1)
    tokens: int = _option(8192, "places of a batch: it has tokens / width rows", 1)
    widths: tuple[int, ...] = _option(
        (64, 192, 448), "row lengths; a conversation goes to the shortest that holds it", 2
    )
    width_shares: tuple[float, ...] = _option((0.25, 0.4, 0.35), "share of the steps at each width", 0)
    learning_rate: float = _option(2e-3, "peak, after a linear warm-up and before a cosine to 0", 0)
    warmup: int = _option(100, "steps of the warm-up", 0)
    weight_decay: float = _option(0.1, "of the matrices", 0)
    beta2: float = _option(0.98, "decay of Adam's second moment", 0, 1)
    clip: float = _option(1.0, "largest global norm of a gradient", 0)
    bias_rate: float = _option(1e-3, "step of the router bias towards equal load", 0)
    thinking: float = _option(0.6, "share of the conversations in thinking mode", 0, 1)
    tasks: tuple[tuple[str, float], ...] = (*((task, 1.0) for task in TASKS), ("chat", 1.0))
    workers: int = _option(0, "processes that make batches; 0 makes them between the steps", 0)
    log_every: int = _option(20, "steps between two lines of the log", 1)
    save_every: int = _option(500, "steps between two checkpoints", 1)
    keep: int = _option(2, "checkpoints kept", 1)

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)})

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.metadata:
                _check(field, getattr(self, field.name))
        if list(self.widths) != sorted(set(self.widths)) or len(self.widths) != len(self.width_shares):
            raise ConfigError(
                f"widths are {list(self.widths)} with the width_shares {list(self.width_shares)};"
                " give ascending widths and one share for each"
            )
        if self.widths[-1] > min(self.tokens, self.model.max_position_embeddings):
            raise ConfigError(
                f"the largest width {self.widths[-1]} exceeds tokens {self.tokens} or max_position_embeddings"
                f" {self.model.max_position_embeddings}; lower the width or raise these"
            )
        for name, shares in (("width_shares", self.width_shares), ("tasks", [share for _, share in self.tasks])):
            if not any(shares):
                raise ConfigError(f"{name} are all 0; give at least one share above 0")
        if self.model.mxfp4_experts or self.model.vision is not None:
            raise ConfigError("[model] has mxfp4_experts or vision; leave both out, experts are packed when exporting")


def _check(field: dataclasses.Field, value: Any) -> None:
    default: Any = field.default
    several = isinstance(default, tuple)
    values = value if several else (value,)
    kind = type(default[0] if several else default)
    accepts = (int, float) if kind is float else kind
    low, high = field.metadata["least"], field.metadata["most"]
    if not isinstance(values, tuple) or not values:
        raise ConfigError(f"{field.name} is {value!r}, expected a list of at least one {kind.__name__}")
    for v in values:
        if not isinstance(v, accepts) or isinstance(v, bool):
            raise ConfigError(f"{field.name} is {v!r}, expected {kind.__name__}; see `k3jax-train sft --help`")
        if kind is not str and not ((low is None or v >= low) and (high is None or v <= high)):
            limit = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{field.name} is {v}, allowed is {limit}; see `k3jax-train sft --help`")


def read_sft_config(path: str | Path, **overrides: Any) -> SftConfig:
    """The options of a TOML file; `overrides` that are not None replace its values."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a TOML file such as train/configs/nano.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}); correct it") from None
    data |= {key: value for key, value in overrides.items() if value is not None}
    known = [field.name for field in dataclasses.fields(SftConfig)]
    for key in data:
        if key not in known:
            raise ConfigError(f"{path} has the unknown option {key!r}; known are {', '.join(known)}")
    tasks = _table(path, data, "tasks")
    for task, share in (tasks or {}).items():
        if task not in (*TASKS, "chat"):
            raise ConfigError(f"{path} has the unknown task {task!r}; known are {', '.join(TASKS)} and chat")
        if not isinstance(share, int | float) or isinstance(share, bool) or share < 0:
            raise ConfigError(f"tasks.{task} is {share!r}; give a share of 0 or more")
    model = _table(path, data, "model")
    if model is None:
        raise ConfigError(f"{path} has no table [model]; give the sizes of the model")
    fields = {field.name: field for field in dataclasses.fields(K3Config)}
    for key in model:
        if key not in fields:
            raise ConfigError(f"{path} has the unknown model option {key!r}; known are {', '.join(fields)}")
    for key, field in fields.items():
        if key not in model and field.default is dataclasses.MISSING:
            raise ConfigError(f"{path} lacks model.{key}; give it a value")
    values = {key: _frozen(value) for key, value in data.items() if key not in ("model", "tasks")}
    if tasks is not None:
        values["tasks"] = tuple(tasks.items())
    return SftConfig(model=K3Config(**{key: _frozen(value) for key, value in model.items()}), **values)


def _table(path: Path, data: dict[str, Any], name: str) -> dict[str, Any] | None:
    table = data.get(name)
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{path} has {name} = {table!r}, expected a table; write [{name}]")
    return table


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def describe_options() -> str:
    """One line per option with its default, for `--help`."""
    fields = [field for field in dataclasses.fields(SftConfig) if field.metadata]
    lines = [f"  {f.name:<15}{f.metadata['help']} (default: {_shown(f.default)})" for f in fields]
    lines.append(f"  [tasks]        share of the exchanges of {', '.join(TASKS)} and chat (default: 1 each)")
    lines.append("  [model]        fields of K3Config; dtype is that of the activations (no default)")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
