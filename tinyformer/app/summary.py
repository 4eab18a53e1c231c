"""What a run came to: for the eye, and as results.json."""

import json
import math
from pathlib import Path
from typing import Any

from tinyformer.data import TokenSplit


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write `results.json`, whole or not at all; a number that is none (nan, infinity) becomes null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in results.items()
    }
    temporary = path.with_suffix(".json.partial")
    temporary.write_text(json.dumps(clean, indent=2, ensure_ascii=False) + "\n")
    temporary.replace(path)


def split_results(metrics: dict[str, float], split: TokenSplit, prefix: str) -> dict[str, Any]:
    """The part of `results.json` about one split: its scores, and what they were taken over."""
    names = ("loss", "perplexity", "bits_per_byte", "accuracy", "accuracy_top5")
    counts = ("num_tokens", "num_bytes", "num_unknown")
    return {f"{prefix}/{name}": metrics.get(f"val/{name}") for name in names} | {
        f"{prefix}/{name}": getattr(split, name) for name in counts
    }


def describe_split(results: dict[str, Any], prefix: str) -> dict[str, str | None]:
    """The lines of the summary about one split."""
    value = {key.partition("/")[2]: value for key, value in results.items() if key.startswith(f"{prefix}/")}
    bits, unknown = value["bits_per_byte"], value["num_unknown"]
    reason = "characters were unknown" if unknown else "not every token is scored"
    return {
        f"{prefix} loss": f"{value['loss']:.4f} nats per token, over {value['num_tokens']:,} tokens of "
        f"{value['num_bytes']:,} bytes",
        "perplexity": f"{value['perplexity']:.2f}",
        "bits per byte": f"none, since {reason}" if bits is None else f"{bits:.4f}",
        "next token": f"{value['accuracy']:.1%} right, {value['accuracy_top5']:.1%} among the first five",
        "unknown": f"{unknown:,} characters became <unk>" if unknown else None,
    }


def print_summary(rows: dict[str, str | None]) -> None:
    """Print names and values, one a line; those without a value are left out."""
    width = max(map(len, rows)) + 2
    print()
    for name, value in rows.items():
        if value is not None:
            print(f"{name:<{width}}{value}")


def shown(path: Path) -> str:
    """A path as one would type it from here."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def indent(text: str) -> str:
    """A text sample, set off from the rest."""
    return "\n".join(f"  {line}" for line in text.splitlines())
