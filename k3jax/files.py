"""JSON files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, error: type[ValueError] = ValueError) -> Any:
    """What the file holds; `error`, in one sentence, when it is unreadable or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise error(f"{path} nests its JSON too deeply; download it again") from None
    except (ValueError, OSError) as reason:
        text = str(reason).splitlines()[0][:200]
        raise error(f"{path} is not valid JSON ({text}); download it again") from None
