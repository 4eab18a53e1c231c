"""The files of `tinyformer/` that a reader meets between `python train.py` and the first loss.

    python benchmarks/path_to_loss.py [OVERRIDE …]

counts the files with a function that runs before `TrainingModule.training_step` first returns; a module that is only
imported does not count.
"""

import inspect
import os
import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IN_MODULES = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # functions that a module may run as it is imported


class FirstLoss(BaseException):
    """Ends the program at the first loss; no handler of errors catches it."""


def main() -> None:
    """Run `train.py` up to the first loss, and print the files and their lines."""
    files: set[str] = set()
    package = f"{ROOT / 'tinyformer'}{os.sep}"

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in IN_MODULES
        if is_function and code.co_filename.startswith(package):
            files.add(code.co_filename)
            if event == "return" and code.co_qualname == "TrainingModule.training_step":
                sys.setprofile(None)
                raise FirstLoss

    sys.path.insert(0, str(ROOT))
    sys.argv = ["train.py", *sys.argv[1:]]
    sys.setprofile(watch)
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except FirstLoss:
        pass
    finally:
        sys.setprofile(None)
    lines = {
        file.removeprefix(package): len(Path(file).read_text(encoding="utf-8").splitlines()) for file in sorted(files)
    }
    print(*(f"{number:5} {file}" for file, number in lines.items()), sep="\n")
    print(f"{len(lines)} files, {sum(lines.values()):,} lines")


if __name__ == "__main__":
    main()
