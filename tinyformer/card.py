"""The card of a variant, what it costs before it is trained: `python -m tinyformer.card attention=mha,gqa model=base`.

Parameters, floating-point operations and cache, without weights in memory; `analysis/costs.py` says what is counted.
"""

import argparse
import sys
from pathlib import Path

from tinyformer.app.config import describe_axes
from tinyformer.app.errors import exit_code_of
from tinyformer.app.sweep import compose_sweep

CONFIG_DIR, CONFIG_NAME = Path(__file__).parents[1] / "conf", "card"
AXES = ("model", "attention", "position", "block", "feed_forward", "norm")


def main() -> int:
    """Print the cards that the command line asks for.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    arguments = _parser().parse_intermixed_args()
    return exit_code_of(lambda: _show(arguments), CONFIG_DIR, CONFIG_NAME)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinyformer.card",
        description="What a variant costs: parameters, floating-point operations, cache.",
        epilog=f"The axes of a network and their choices:\n\n{describe_axes(CONFIG_DIR, AXES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as train.py takes them; KEY=A,B shows both")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON to a file")
    return parser


def _show(arguments: argparse.Namespace) -> None:
    variants = compose_sweep(CONFIG_DIR, CONFIG_NAME, arguments.overrides)
    # Torch takes seconds to import: not before the configs are known to compose.
    from tinyformer.app.cards import as_json, make_card, print_table, save

    cards = [make_card(overrides, config) for overrides, config in variants]
    if arguments.save:
        save(cards, arguments.save)
    if arguments.json:
        print(as_json(cards))
    else:
        print_table(cards)
        print(f"Saved in {arguments.save}." if arguments.save else "--save cards.json keeps these numbers as JSON.")


if __name__ == "__main__":
    sys.exit(main())
