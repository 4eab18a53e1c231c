"""Checkpoints from and to Hugging Face folders: `tinyformer convert hf SOURCE out.ckpt`, `… export out.ckpt DIR`.

`tinyformer/interop` maps the weights and config fields of their families to ours, `run/importing` turns a folder into a
checkpoint, and `conversion` a checkpoint into a folder.
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
    importer = directions.add_parser("hf", help="turn a Hugging Face model into a checkpoint for evaluate.py")
    importer.add_argument("source", metavar="SOURCE", help="a folder, a name on the Hub (owner/name) or a GGUF file")
    importer.add_argument("checkpoint", type=Path, metavar="OUT.ckpt", help="the file to write")
    importer.add_argument("--revision", help="a branch, tag or commit of the Hub, such as step1000 (default: main)")
    importer.add_argument("--check", metavar="TEXT", help="compare logits and maps with transformers on a text")
    exporter = directions.add_parser("export", help="turn a checkpoint into a folder that transformers loads")
    exporter.add_argument("checkpoint", type=Path, metavar="FILE.ckpt", help="the checkpoint of a run")
    exporter.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _convert(options), "train")


def _convert(options: argparse.Namespace) -> None:
    # These import torch, which takes seconds; --help does not wait for it.
    if options.direction == "hf":
        from tinyformer.programs.convert.conversion import compare, import_transformers
        from tinyformer.run.importing import import_model

        names = dict.fromkeys(("source", "name", "folder"), "SOURCE")
        names |= {"path": "OUT.ckpt", "revision": "--revision", "check": "--check", "len(texts[0])": "len(--check)"}
        with option_names(**names):
            if options.check is not None:
                import_transformers(options.check)  # refused before anything is written, if it is missing
            lines = import_model(options.source, options.checkpoint, options.revision)
            if options.check is not None:
                say("\n".join(lines))
                lines = compare(options.source, options.checkpoint, options.check, options.revision)
    else:
        from tinyformer.programs.convert.conversion import export_model

        with option_names(path="FILE.ckpt", checkpoint="FILE.ckpt", folder="DIR"):
            lines = export_model(options.checkpoint, options.folder)
    say("\n".join(lines))
