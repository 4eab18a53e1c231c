"""One-line bugs drawn at random from the whole package, and how many of them no test catches.

    python benchmarks/mutants.py                      100 mutants, about three hours of two cores
    python benchmarks/mutants.py --count 20 --seed 1  others
    python benchmarks/mutants.py --list               what would be tried, with the tests
    python benchmarks/mutants.py --json mutants.json  also write the outcomes to a file

A mutant differs from the code in one operator, number, condition or call (DeMillo et al. 1978). First those tests run
that import its file, or that import what imports it; if they pass, the whole fast tier, then the slow one. Some mutants
compute the same as the code, such as a larger number of bins or rows, and cannot be caught. Exit codes as of
`breaks.py`.
"""

import argparse
import ast
import json
import random
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from breaks import FAST, NOT_COPIED, ROOT, SLOW, Outcome, outcome_of

PACKAGE, TESTS = ROOT / "tinyformer", ROOT / "tests"

OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""How each operator is written, and what replaces it."""

FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "continue": "break", "break": "continue"}


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        file: the file, relative to the repository.
        line: the number of the line, from 1 on.
        start: where the changed text begins within the line, in characters.
        old: the text.
        new: what replaces it.
    """

    file: str
    line: int
    start: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.old} -> {self.new}"

    def applied(self, text: str) -> str:
        """The text of the file with the change."""
        lines = text.splitlines(keepends=True)
        at = lines[self.line - 1]
        assert at[self.start :].startswith(self.old), self.name
        lines[self.line - 1] = at[: self.start] + self.new + at[self.start + len(self.old) :]
        return "".join(lines)


@dataclass(frozen=True)
class Source:
    """A file, and the places of its nodes."""

    file: str
    lines: list[str]

    def between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Mutant]:
        """The operator between two operands on one line, replaced."""
        old, new = OPERATORS.get(type(operator), ("", ""))
        if old and left.end_lineno == right.lineno:
            line = self.lines[right.lineno - 1].encode()
            gap = line[left.end_col_offset : right.col_offset].decode()
            before = len(line[: left.end_col_offset].decode())
            if found := re.search(rf"(?<![\w<>=]){re.escape(old)}(?![\w<>=])", gap):
                yield Mutant(self.file, right.lineno, before + found.start(), old, new)

    def whole(self, node: ast.expr | ast.stmt, new: str) -> Iterator[Mutant]:
        """A node on one line, replaced; OLD stands for its own text."""
        if node.lineno == node.end_lineno:
            line = self.lines[node.lineno - 1].encode()
            old = line[node.col_offset : node.end_col_offset].decode()
            if old != new:
                yield Mutant(
                    self.file, node.lineno, len(line[: node.col_offset].decode()), old, new.replace("OLD", old)
                )

    def of_operator(self, node: ast.AST) -> Iterator[Mutant]:
        """Operators and conditions."""
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self.between(left, right, operator)
            case ast.BinOp(left=left, op=operator, right=right):
                yield from self.between(left, right, operator)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from self.between(left, right, operator)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from self.whole(node, ast.unparse(operand))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from self.whole(test, "not (OLD)")

    def of_value(self, node: ast.AST) -> Iterator[Mutant]:
        """Numbers, names and statements."""
        match node:
            case ast.Constant(value=bool() as value):
                yield from self.whole(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield from self.whole(node, str(value + 1))
            case ast.Name(id=name) if name in FUNCTIONS:
                yield from self.whole(node, FUNCTIONS[name])
            case ast.Continue() | ast.Break():
                yield from self.whole(node, FUNCTIONS[type(node).__name__.lower()])
            case ast.Return(value=ast.expr()):
                yield from self.whole(node, "return None")
            case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
                yield from self.whole(node, "pass")

    def mutants(self, node: ast.AST) -> Iterator[Mutant]:
        """All mutants of a node, but of annotations, where nothing is computed."""
        yield from self.of_operator(node)
        yield from self.of_value(node)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.mutants(child)


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, in the order of its nodes."""
    text = path.read_text(encoding="utf-8")
    return list(Source(path.relative_to(ROOT).as_posix(), text.splitlines()).mutants(ast.parse(text)))


@cache
def module_file(name: str) -> Path | None:
    """The file of a module of the package or of the tests, whose folders need no `__init__.py`."""
    for root in (ROOT, TESTS):
        stem = root.joinpath(*name.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


def imported(path: Path) -> set[Path]:
    """The files of the package and of the tests that a file imports; lazy names as its package's stub gives them."""
    found: set[Path | None] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {module_file(alias.name) for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {alias.name for alias in node.names}
            package = module_file(node.module)
            found |= {package} | {module_file(f"{node.module}.{name}") for name in names}
            stub = package.with_suffix(".pyi") if package else None
            for line in ast.parse(stub.read_text(encoding="utf-8")).body if stub and stub.is_file() else ():
                if isinstance(line, ast.ImportFrom) and names & {alias.name for alias in line.names}:
                    found.add(module_file(f"{node.module}.{line.module}"))
    return {one for one in found if one is not None} - {path}


def nearest_tests(file: Path, importers: Mapping[Path, set[Path]]) -> list[str]:
    """The test files that import a file, or else those that import one that does, and so on."""
    seen, level = {file}, {file}
    while level:
        level = {one for of in level for one in importers[of]} - seen
        seen |= level
        if tests := sorted(one for one in level if one.name.startswith("test_")):
            return [one.relative_to(ROOT).as_posix() for one in tests]
    return []


def main() -> int:
    """Draw mutants, and try them.

    Returns:
        The exit code: 0 if all were caught, 1 if one survived, 2 if tests could not be run.
    """
    parser = argparse.ArgumentParser(description="One-line bugs drawn at random from the package.")
    parser.add_argument("--count", type=int, default=100, help="number of mutants (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and try none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file")
    options = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in [*files, *TESTS.rglob("*.py")]:
        for one in imported(path):
            importers[one].add(path)
    every = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    print(f"{len(drawn)} of {len(every):,} mutants, seed {options.seed}.", flush=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        for mutant in drawn:
            tests = nearest_tests(ROOT / mutant.file, importers)
            if options.list:
                print(f"{mutant.name}  {' '.join(tests)}")
                continue
            path = tree / mutant.file
            text = path.read_text(encoding="utf-8")
            path.write_text(mutant.applied(text), encoding="utf-8")
            for paths, marker in ((tests, FAST), (["tests"], FAST), (["tests"], SLOW)):
                outcome = outcome_of(mutant.name, tree, [*paths, "-n", "2"], marker)
                if outcome.outcome == "caught" or (outcome.outcome == "error" and paths == ["tests"]):
                    break  # the nearest tests may all be slow, which is an error of the first run
            path.write_text(text, encoding="utf-8")
            outcomes.append(outcome)
            print(f"{outcome.outcome:<9} {outcome.seconds:6.1f} s  {mutant.name}  {outcome.by}", flush=True)
            if options.json:
                record = {"seed": options.seed, "mutants": [asdict(one) for one in outcomes]}
                options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    survived, errors = (sum(one.outcome == kind for one in outcomes) for kind in ("survived", "error"))
    if outcomes:
        print(f"{len(outcomes) - survived - errors} of {len(outcomes)} caught, {survived} survived.")
    return 2 if errors else int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
