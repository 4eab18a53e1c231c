"""Mutants: the package with one operator, number, condition or call changed (DeMillo et al. 1978).

`breaks.py --draw` tries them. Some compute the same as the code, such as a larger number of bins or rows, and cannot be
caught.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
"""The text of each operator, and the text that replaces it."""

FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "continue": "break", "break": "continue"}


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        file: the file, relative to the package.
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
    return list(Source(path.relative_to(PACKAGE).as_posix(), text.splitlines()).mutants(ast.parse(text)))


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


def draw(count: int, seed: int) -> Iterator[tuple[Mutant, list[str]]]:
    """Some mutants of the package, drawn at random, each with its nearest tests."""
    files = sorted(PACKAGE.rglob("*.py"))
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in [*files, *TESTS.rglob("*.py")]:
        for one in imported(path):
            importers[one].add(path)
    every = [mutant for path in files for mutant in mutants_of(path)]
    for mutant in random.Random(seed).sample(every, min(count, len(every))):
        yield mutant, nearest_tests(PACKAGE / mutant.file, importers)
