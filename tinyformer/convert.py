"""Models of Hugging Face, in and out: `python -m tinyformer.convert hf DIR_OR_NAME out.ckpt`, `… export out.ckpt DIR`.

GPT-2, BERT, Llama and Mistral; `tinyformer/interop` says what of them is what of ours.
"""

import argparse
import sys
from pathlib import Path

from tinyformer.app.errors import exit_code_of

CONFIG_DIR, CONFIG_NAME = Path(__file__).parents[1] / "conf", "train"


def main() -> int:
    """Convert what the command line names.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    arguments = _parser().parse_args()
    return exit_code_of(lambda: _convert(arguments), CONFIG_DIR, CONFIG_NAME)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinyformer.convert", description="Hugging Face's GPT-2, BERT, Llama and Mistral, in and out."
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    inward = directions.add_parser("hf", help="a Hugging Face folder becomes a checkpoint, for evaluate.py")
    inward.add_argument("source", metavar="DIR_OR_NAME", help="the folder, or its name on the Hub: owner/name")
    inward.add_argument("checkpoint", type=Path, metavar="OUT.ckpt", help="the file to write")
    outward = directions.add_parser("export", help="a checkpoint becomes a folder that transformers loads")
    outward.add_argument("checkpoint", type=Path, metavar="FILE.ckpt", help="of a run")
    outward.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    return parser


def _convert(arguments: argparse.Namespace) -> None:
    # Torch takes seconds to import: not for --help.
    from tinyformer.app.conversion import export_model, import_model

    if arguments.direction == "hf":
        lines = import_model(arguments.source, arguments.checkpoint, CONFIG_DIR)
    else:
        lines = export_model(arguments.checkpoint, arguments.folder, CONFIG_DIR)
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
