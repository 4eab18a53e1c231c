"""Prompts, after which a model predicts a token, and pairs of prompts that call for different tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Text, changed
from tinyformer.analysis.texts.relation_lines import compare, read_columns
from tinyformer.data.batches.windows import Batch, tensors
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.measures.points import ForwardPass, forward_pass, lengths_of
from tinyformer.nn import BACKENDS
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks import CausalLM, Classification, Seq2Seq
from tinyformer.tasks.user_texts import TextReader

COLUMNS = ("clean", "corrupted", "answer", "against")  # of a file of pairs
LENGTH = 24  # tokens of a prompt of `induction_pairs`


@dataclass(frozen=True)
class Prompts:
    """Prompts of equal length, and for each the token (or class) whose logit is its score."""

    batch: Batch  # without padding
    places: Int[Tensor, " prompts"] | None  # the position whose logits are used; None for a classifier
    answers: Int[Tensor, " prompts"]  # the index of the answer among the logits
    against: Int[Tensor, " prompts"] | None = None  # the index of the logit that is subtracted

    def score(self, logits: Float[Tensor, "prompts *seq scores"]) -> Float[Tensor, " prompts"]:
        """The logit of each answer, minus that of `against`."""
        rows = torch.arange(len(logits), device=logits.device)
        at_place = logits if self.places is None else logits[rows, self.places]
        at_place = at_place.to(torch.promote_types(logits.dtype, torch.float32))
        score = at_place[rows, self.answers]
        return score if self.against is None else score - at_place[rows, self.against]

    def title(self, context: AnalysisContext, row: int = 0) -> str:
        """The answer of a prompt in words, such as "mat", or "mat" minus "dog"."""
        names = [_string(context, int(of[row])) for of in (self.answers, self.against) if of is not None]
        return " minus ".join(f'"{name}"' for name in names)

    def keys(self, context: AnalysisContext, row: int = 0) -> dict[str, list[str]]:
        """The tokens of the keys in each kind of attention, for one of the prompts."""
        tokens = context.tokenizer.token_strings(self.batch["inputs"][row])
        if "source" not in self.batch:
            return {"": tokens}
        source = context.tokenizer.token_strings(self.batch["source"][row])
        return {"encoder": source, "decoder": tokens, "cross": source}

    def sizes(self) -> tuple[torch.Size, ...]:
        """The shapes of the inputs, which are the same for prompts with the same number of tokens."""
        return tuple(part.shape for part in tensors(self.batch).values())

    def rows(self, rows: Int[Tensor, " rows"]) -> "Prompts":
        """The prompts in the given rows."""
        return _joined(lambda parts: parts[0][rows], self)

    def run(self, context: AnalysisContext, **options: Any) -> tuple[Float[Tensor, " prompts"], dict[str, Tensor]]:
        """The scores in an `exact_pass`, and its captured activations."""
        logits, activations = exact_pass(context, self.batch, **options)
        return self.score(logits), activations


def exact_pass(context: AnalysisContext, batch: Batch, **options: Any) -> ForwardPass:
    """A forward pass of the context's network, with the options of `forward_pass`.

    Attention uses the eager backend and the dtype of the weights, not that of `context.precision`, so that captured
    activations add up to the residual stream exactly.
    """
    network = context.network
    with changed(network.attentions(), resolved=BACKENDS["eager"]):
        return forward_pass(network, lambda: context.task.forward(network, batch), lengths_of(batch), **options)


class Pairs(NamedTuple):
    """Clean and corrupted prompts of the same length, which are scored by the logits of the same tokens."""

    clean: Prompts
    corrupted: Prompts
    roles: Sequence[str] = ()  # the role of each position, if tokens differ between pairs; "" for none


def read_text(
    context: AnalysisContext, text: Text, target: str | None = None, argument: str = "text", is_scored: bool = False
) -> Batch:
    """The batch of a text, or of a pair of texts, with its targets if `is_scored`."""
    task, reader, others = context.task, TextReader(context.network, context.tokenizer), list[Any]()
    if isinstance(task, Seq2Seq):
        others = [] if target is None else [[target]]
    context.tokens_of(text, argument=argument)  # raises an error unless it is a text, or a pair of texts
    row: Any = text if isinstance(text, str) else tuple(text)
    sizes = {"len(texts[0])": f"len({argument})", "len(targets[0])": "len(target)"}
    with argument_path(passed={"texts": argument, "targets": "target"} | sizes):
        return (task.read_scored if is_scored else task.read)(reader, [row], *others)


def read_prompt(
    context: AnalysisContext,
    text: Text,
    target: str | None = None,
    answer: str | None = None,
    against: str | None = None,
    argument: str = "text",
) -> Prompts:
    """The prompt of a text; by default, its answer is the model's prediction.

    A prediction is the token after a text, the token at its mask token, the label of a text, or the next token of an
    encoder–decoder's target, which begins with `target`.
    """
    beginning = (target or "") if isinstance(context.task, Seq2Seq) else target
    batch = read_text(context, text, beginning, argument)
    with argument_path(passed={"text": argument}):
        places = context.task.places(batch, context.tokenizer)
    if answer:
        index = _index(context, "answer", answer)
    else:
        with torch.no_grad(), context.precision():
            logits = context.task.forward(context.network, batch)[0]
        index = int((logits if places is None else logits[places[0]]).argmax())
    answers = batch["inputs"].new_tensor([index])
    second = answers.new_tensor([_index(context, "against", against)]) if against else None
    return Prompts(batch, places, answers, second)


@dataclass(eq=False)
class PairAnalysis:
    """An analysis of pairs of prompts: the clean and the corrupted prompt call for different answers.

    Args:
        clean: a prompt, see `read_prompt`; by default, pairs of random tokens that repeat, see `induction_pairs`.
        corrupted: a prompt with as many tokens that calls for another answer.
        target: the beginning of the target of both prompts, in an encoder–decoder.
        answer: the token (or label) that the clean prompt calls for; by default what the model predicts.
        against: the token (or label) that the corrupted prompt calls for; by default what the model predicts.
        file: a .csv or .jsonl file of pairs, with the columns `clean, corrupted, answer, against`.
        num_pairs: the number of pairs of random tokens.
        seed: the seed for the random tokens, and for all other random draws.
    """

    clean: Text | None = None
    corrupted: Text | None = None
    target: str | None = None
    answer: str | None = None
    against: str | None = None
    file: str | None = None
    num_pairs: int = 64
    seed: int = 0
    num_windows = 1  # the sample is not used
    needs_gradient = False  # of the run's backend: `exact_pass` uses the eager backend

    def pairs(self, context: AnalysisContext) -> list[Pairs]:
        """The pair of two texts, the pairs of a file or, if neither is given, `induction_pairs`; grouped by length."""
        names = ("clean", "corrupted", "target", "answer", "against")
        if self.file is None and all(getattr(self, name) is None for name in names):
            return [induction_pairs(context, self.num_pairs, self.seed)]
        of_length = defaultdict[Any, list[Pairs]](list)
        for pair in [self._pair(context)] if self.file is None else self._of_file(context, self.file):
            of_length[pair.clean.sizes()].append(pair)
        groups = (zip(*group, strict=True) for group in of_length.values())
        return [Pairs(_joined(torch.cat, *clean), _joined(torch.cat, *corrupted)) for clean, corrupted, _ in groups]

    def result(
        self, context: AnalysisContext, groups: Sequence[Pairs], trained: Tensor, untrained: Tensor
    ) -> tuple[AnalysisResult, str, bool]:
        """The result, a sentence on the scores, and True if `trained` is clearly above 0 and above `untrained`."""
        number, (own, control) = len(trained), map(compare, (trained, untrained))
        title = groups[0].clean.title(context) if number == 1 else f"{number} pairs"
        facts = {name: fact for name, fact in context.facts.items() if name != "data"}
        facts["pairs"] = f"{number} of {self.file or 'random tokens that repeat'}"
        if self.clean and self.corrupted:
            texts = ([text] if isinstance(text, str) else text for text in (self.clean, self.corrupted))
            facts = context.facts_of_text([*chain(*texts)])
        scalars = {"analysis/difference": own.mean, "analysis/untrained_difference": control.mean}
        is_clear = min(own.low, compare(trained, untrained).low) > 0
        words = f"{title}: clean minus corrupted {own} logits; untrained {control}"
        return AnalysisResult({**scalars}, facts=facts), words, is_clear

    def _pair(self, context: AnalysisContext) -> Pairs:
        texts: Any = self.clean, self.corrupted or ""
        first = read_prompt(context, texts[0], self.target, self.answer, self.against, "clean")
        second = read_prompt(context, texts[1], self.target, self.against, argument="corrupted")
        if first.sizes() != second.sizes():
            own, other = (context.tokenizer.token_strings(context.tokens_of(text)) for text in texts)
            reason = f"must have as many tokens as the clean prompt, {len(own)}: {own}; it has {other}"
            raise ArgumentError("corrupted", self.corrupted, reason)
        answers, others = first.answers, second.answers if first.against is None else first.against
        if torch.equal(answers, others):
            reason = f'must be another answer than "{_string(context, int(others))}", the answer of the clean prompt'
            raise ArgumentError("against", self.against, reason)
        first, second = (replace(side, answers=answers, against=others) for side in (first, second))
        return Pairs(first, second)

    def _of_file(self, context: AnalysisContext, file: str) -> Iterator[Pairs]:
        for number, row in enumerate(read_columns(file, COLUMNS), start=1):
            texts: Any = dict(zip(COLUMNS, (str(value or "") for value in row), strict=True))
            try:
                yield replace(self, **texts)._pair(context)
            except ArgumentError as error:
                raise ArgumentError("file", file, f"row {number}: {error.describe().removesuffix('.')}") from None


def induction_pairs(context: AnalysisContext, number: int, seed: int = 0) -> Pairs:
    """Random tokens that begin to repeat: "… A B … C D … A" calls for B, the corrupted "… C B … A D … A" for D.

    Both prompts contain B and D at the same positions: only the tokens before B and D tell which of them is right.
    """
    if not isinstance(context.task, CausalLM):
        reason = (
            "must be given: the default, prompts of random tokens that repeat, is for models of task=causal_lm only"
        )
        raise ArgumentError("clean", None, reason, {"clean": "A cat is", "corrupted": "A dog is"})
    network, tokenizer = context.network, context.tokenizer
    words = torch.tensor(tokenizer.text_ids(network.vocab_size))
    start = torch.tensor(tokenizer.around[0], dtype=torch.long)
    length = min(LENGTH, network.max_seq_len - len(start), len(words))
    period = max(5 * length // 8, length // 2 + 2)
    a, b, c, d = length - period - 1, length - period, period - 2, period - 1
    generator, device = torch.Generator().manual_seed(seed), next(network.parameters()).device
    drawn = [torch.randperm(len(words), generator=generator)[:period] for _ in range(number)]
    clean = words[torch.stack(drawn)].repeat(1, 2)[:, :length]
    corrupted = clean.clone()
    corrupted[:, [a, c]] = clean[:, [c, a]]

    def prompts(tokens: Int[Tensor, "prompts seq"]) -> Prompts:
        inputs = torch.cat([start.expand(number, -1), tokens], dim=1).to(device)
        lengths = torch.full((number,), inputs.shape[1], device=device)
        return Prompts({"inputs": inputs, "lengths": lengths}, lengths - 1, *clean[:, [b, d]].to(device).unbind(dim=1))

    named = {a: "A/C", b: "B", c: "C/A", d: "D", length - 1: "A"}
    return Pairs(prompts(clean), prompts(corrupted), [named.get(at, "") for at in range(-len(start), length)])


def _string(context: AnalysisContext, index: int) -> str:
    """The token, or the class, whose logit has the given index."""
    if isinstance(context.task, Classification):
        return context.task.labels[index]
    return context.tokenizer.token_strings([index])[0]


def _index(context: AnalysisContext, argument: str, word: str) -> int:
    """The index of the logit of a token, or of a class."""
    if isinstance(context.task, Classification):
        return context.task.index_of(argument, word)
    ids = TextReader(context.network, context.tokenizer).rows_of(word, around=False)[0]
    if len(ids) != 1 or ids[0] == context.tokenizer.unk_id:
        reason = f"must be one token of the vocabulary; it is {context.tokenizer.token_strings(ids)}"
        raise ArgumentError(argument, word, reason)
    return ids[0]


def _joined(join: Callable[[list[Tensor]], Tensor], *prompts: Prompts) -> Prompts:
    """Combine prompts: for each tensor of `Prompts`, `join` receives the list of this tensor from all given prompts."""
    batch = {name: join([tensors(some.batch)[name] for some in prompts]) for name in tensors(prompts[0].batch)}
    others = {name: [getattr(some, name) for some in prompts] for name in ("places", "answers", "against")}
    given: dict[str, Any] = {name: None if parts[0] is None else join(parts) for name, parts in others.items()}
    return Prompts(cast(Batch, batch), **given)
