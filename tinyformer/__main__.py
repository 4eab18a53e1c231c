"""The programs of tinyformer: `tinyformer train attention=gqa`, or `python -m tinyformer train attention=gqa`."""

import difflib
import importlib
import sys

PROGRAMS = {
    "train": ("tinyformer.run.programs", "train a model"),
    "evaluate": ("tinyformer.run.programs", "score a checkpoint, analyse its heads, sample text"),
    "card": ("tinyformer.programs.card", "parameters, FLOPs and KV cache of a variant before it is trained"),
    "compare": ("tinyformer.programs.compare.__main__", "runs side by side, averaged over seeds"),
    "convert": ("tinyformer.programs.convert.__main__", "import and export Hugging Face models"),
    "findings": ("tinyformer.programs.findings.__main__", "claims of papers about attention, tested on this machine"),
    "doctor": ("tinyformer.programs.doctor.__main__", "check every attention backend on this machine"),
}
"""The module of each program, which is imported when it runs, since torch takes seconds; and its purpose."""

USAGE = "usage: tinyformer PROGRAM …\n\n{}\n\n`tinyformer PROGRAM --help` describes a program.".format(
    "\n".join(f"  {name:<10}{purpose}" for name, (_, purpose) in PROGRAMS.items())
)


def main() -> int:
    """Run the program that the first word of the command line names.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    program = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if program in ("-h", "--help"):
        print(USAGE)
        return 0
    if program not in PROGRAMS:
        close = difflib.get_close_matches(program, PROGRAMS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Programs: {', '.join(PROGRAMS)}."
        print(f"Error: tinyformer {program}: there is no such program. {hint}", file=sys.stderr)
        return 2
    module, command = importlib.import_module(PROGRAMS[program][0]), f"tinyformer {program}"
    if program in ("train", "evaluate"):
        return getattr(module, f"{program}_program")(command, num_words=1)
    return module.main(sys.argv[2:], prog=command)


if __name__ == "__main__":
    sys.exit(main())
