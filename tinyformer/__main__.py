"""The programs of tinyformer, run as `tinyformer train attention=gqa` or `python -m tinyformer train attention=gqa`."""

import importlib
import sys

PROGRAMS = {
    "train": "train a model",
    "evaluate": "score a checkpoint, analyse its heads, sample text",
    "card": "parameters, FLOPs and KV cache of a variant before it is trained",
    "compare": "runs side by side, averaged over seeds",
    "convert": "import and export Hugging Face models",
    "findings": "claims of papers about attention, tested on this machine",
    "demo": "train a model in a minute, and see an induction head form",
    "doctor": "check every attention backend on this machine",
}

USAGE = "usage: tinyformer PROGRAM …\n\n{}\n\n`tinyformer PROGRAM --help` describes a program.".format(
    "\n".join(f"  {name:<10}{purpose}" for name, purpose in PROGRAMS.items())
)


def main() -> int:
    """Run the program that the first word of the command line names.

    Returns:
        The exit code: 0 for success, 1 for a bug, 2 for a mistake of the user.
    """
    program = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if program in ("-h", "--help"):
        print(USAGE)
        return 0
    if program not in PROGRAMS:
        print(f"Error: tinyformer {program}: there is no such program.\n{USAGE}", file=sys.stderr)
        return 2
    # Imported only now: each program imports what it needs, and torch takes seconds.
    if program in ("train", "evaluate"):
        programs = importlib.import_module("tinyformer.programs.train_evaluate")
        return getattr(programs, f"{program}_program")(sys.argv[2:], f"tinyformer {program}")
    return importlib.import_module(f"tinyformer.programs.{program}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
