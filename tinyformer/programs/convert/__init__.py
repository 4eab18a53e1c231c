"""Checkpoints from and to Hugging Face folders: `tinyformer convert hf DIR_OR_NAME out.ckpt`, `… export out.ckpt DIR`.

`tinyformer/interop` maps the weights and config fields of their families to ours, and `conversion` turns a folder into
a checkpoint and back.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tinyformer.config.errors import exit_code_of, option_names, say


def main(arguments: Sequence[str]) -> int:
    """Convert the model that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tinyformer convert",
        description="Import and export models of Hugging Face: Pythia, Llama, Qwen, Gemma, BERT, T5 and others.",
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    importer = directions.add_parser("hf", help="turn a Hugging Face folder into a checkpoint for evaluate.py")
    importer.add_argument("source", metavar="DIR_OR_NAME", help="the folder, or its name on the Hub: owner/name")
    importer.add_argument("checkpoint", type=Path, metavar="OUT.ckpt", help="the file to write")
    exporter = directions.add_parser("export", help="turn a checkpoint into a folder that transformers loads")
    exporter.add_argument("checkpoint", type=Path, metavar="FILE.ckpt", help="the checkpoint of a run")
    exporter.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _convert(options), "train")


def _convert(options: argparse.Namespace) -> None:
    # This imports torch, which takes seconds; --help does not wait for it.
    from tinyformer.programs.convert.conversion import export_model, import_model

    if options.direction == "hf":
        with option_names(source="DIR_OR_NAME", name="DIR_OR_NAME", folder="DIR_OR_NAME", path="OUT.ckpt"):
            lines = import_model(options.source, options.checkpoint)
    else:
        with option_names(path="FILE.ckpt", checkpoint="FILE.ckpt", folder="DIR"):
            lines = export_model(options.checkpoint, options.folder)
    say("\n".join(lines))
