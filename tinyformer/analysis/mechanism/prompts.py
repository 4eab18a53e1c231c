"""Prompts, after each of which a model predicts a token, and pairs of them that call for different ones."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.points import ForwardPass, forward_pass, lengths_of
from tinyformer.analysis.subject import Subject, Text, changed, refuse_target
from tinyformer.batch import IGNORED, Batch, tensors
from tinyformer.data.sources.files import READERS, Layout, read_rows
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.nn import BACKENDS
from tinyformer.tasks import CausalLM, Classification, Seq2Seq
from tinyformer.tasks.user_texts import TextReader

COLUMNS = ("clean", "corrupted", "answer", "against")
"""The columns of a file of pairs."""

LENGTH = 24  # tokens of a prompt of `induction_pairs`


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length, and the token (or class) after each whose logit is its score.

    Args:
        batch: the prompts, without padding.
        places: the position whose logits are read in each; None for a classifier, which has logits for the whole text.
        answers: the index of the answer among the logits.
        against: the index of the one whose logit is subtracted; None for none.
    """

    batch: Batch
    places: Int[Tensor, " prompts"] | None
    answers: Int[Tensor, " prompts"]
    against: Int[Tensor, " prompts"] | None = None

    def score(self, logits: Float[Tensor, "prompts *seq scores"]) -> Float[Tensor, " prompts"]:
        """The logit of each answer, minus that of `against`."""
        rows = torch.arange(len(logits), device=logits.device)
        at_place = logits if self.places is None else logits[rows, self.places]
        at_place = at_place.to(torch.promote_types(logits.dtype, torch.float32))
        score = at_place[rows, self.answers]
        return score if self.against is None else score - at_place[rows, self.against]

    def spread(self, values: Int[Tensor, " prompts"]) -> Int[Tensor, "prompts seq"]:
        """A value of each prompt at the token whose logits are read, or one in all for a classifier; else `IGNORED`."""
        if self.places is None:
            return values.unsqueeze(1)
        return torch.full_like(self.batch["inputs"], IGNORED).scatter(1, self.places[:, None], values[:, None])

    def title(self, subject: Subject, row: int = 0) -> str:
        """The answer of a prompt in words, such as "mat", or "mat" minus "dog"."""
        names = [_string(subject, int(of[row])) for of in (self.answers, self.against) if of is not None]
        return " minus ".join(f'"{name}"' for name in names)

    def keys(self, subject: Subject, row: int = 0) -> dict[str, list[str]]:
        """The tokens of a prompt, as the keys of each kind of attention."""
        strings = subject.tokenizer.token_strings
        inputs = strings(self.batch["inputs"][row])
        if "source" not in self.batch:
            return {"": inputs}
        source = strings(self.batch["source"][row])
        return {"encoder": source, "decoder": inputs, "cross": source}

    def rows(self, rows: Int[Tensor, " rows"]) -> "Prompts":
        """Some of the prompts."""
        batch = cast(Batch, {name: of[rows] for name, of in tensors(self.batch).items()})
        places, against = (None if of is None else of[rows] for of in (self.places, self.against))
        return Prompts(batch, places, self.answers[rows], against)

    def run(self, subject: Subject, **options: Any) -> tuple[Float[Tensor, " prompts"], dict[str, Tensor]]:
        """The scores in an `exact_pass`, and its captured activations."""
        logits, activations = exact_pass(subject, self.batch, **options)
        return self.score(logits), activations


def exact_pass(subject: Subject, batch: Batch, **options: Any) -> ForwardPass:
    """A forward pass of the subject's network, with the options of `forward_pass`.

    Attention is computed by its definition, and in the dtype of the weights instead of that of `subject.precision`, so
    that what adds up in the network adds up in its activations.
    """
    network = subject.network
    with changed(network.attentions(), resolved=BACKENDS["eager"]):
        return forward_pass(network, lambda: subject.task.forward(network, batch), lengths_of(batch), **options)


@dataclass(frozen=True)
class Pairs:
    """Clean prompts, and corrupted ones of the same length, which are scored by the same tokens."""

    clean: Prompts
    corrupted: Prompts
    roles: Sequence[str] = ()  # of the tokens, where each pair has others; "" for none


def read_prompt(
    subject: Subject,
    text: Text,
    target: str | None = None,
    answer: str | None = None,
    against: str | None = None,
    argument: str = "text",
) -> Prompts:
    """The prompt of a text: by default, its answer is what the model predicts.

    That is the token after a text, the one at its mask token, the label of a text, or the next token of an
    encoder–decoder's target, which begins with `target`.
    """
    if not isinstance(subject.task, Seq2Seq):
        refuse_target(target)
    subject.tokens_of(text, argument=argument)  # refuses what is no text, or no pair of texts
    row: Any = text if isinstance(text, str) else tuple(text)
    others = [[target or ""]] if isinstance(subject.task, Seq2Seq) else []
    sizes = {"len(texts[0])": f"len({argument})", "len(targets[0])": "len(target)"}
    with argument_path(passed={"texts": argument, "text": argument, "targets": "target"} | sizes):
        batch = subject.task.read(TextReader(subject.network, subject.tokenizer), [row], *others)
        places = subject.task.places(batch, subject.tokenizer)
    if answer:
        index = _index(subject, "answer", answer)
    else:
        with torch.no_grad(), subject.precision():
            logits = subject.task.forward(subject.network, batch)[0]
        index = int((logits if places is None else logits[places[0]]).argmax())
    answers = batch["inputs"].new_tensor([index])
    second = answers.new_tensor([_index(subject, "against", against)]) if against else None
    return Prompts(batch, places, answers, second)


def read_pairs(
    subject: Subject,
    clean: Text | None = None,
    corrupted: Text | None = None,
    target: str | None = None,
    answer: str | None = None,
    against: str | None = None,
    file: str | None = None,
    num_pairs: int = 64,
    seed: int = 0,
) -> list[Pairs]:
    """The pair of two texts, those of a file with the `COLUMNS`, or else `induction_pairs`; each length apart.

    By default, the answers are what the model predicts after the clean prompt and, `against`, after the corrupted one.
    """
    texts = {"clean": clean, "corrupted": corrupted, "target": target, "answer": answer, "against": against}
    given: dict[str, Any] = {name: value for name, value in texts.items() if value is not None}
    if file is not None:
        for name, value in given.items():
            raise ArgumentError(name, value, f"`file`={file} has the prompts and their answers", {name: None})
        pairs = _of_file(subject, file)
    elif not given:
        return [induction_pairs(subject, num_pairs, seed)]
    else:
        for name in ("clean", "corrupted"):
            if name not in given:
                reason = f"must be given with `{next(iter(given))}`: a pair has two prompts"
                raise ArgumentError(name, None, reason, {name: "A cat is"})
        pairs = [_pair(subject, **given)]
    of_length: dict[Any, list[Pairs]] = defaultdict(list)
    for pair in pairs:
        of_length[tuple(part.shape for part in tensors(pair.clean.batch).values())].append(pair)
    return [
        Pairs(_together([pair.clean for pair in group]), _together([pair.corrupted for pair in group]))
        for group in of_length.values()
    ]


def facts_of_pairs(
    subject: Subject, clean: Text | None, corrupted: Text | None, file: str | None, number: int
) -> dict[str, str]:
    """`Subject.facts` for pictures of a number of pairs, see `read_pairs`, in place of the data."""
    if clean is not None and corrupted is not None:
        sides = ([side] if isinstance(side, str) else side for side in (clean, corrupted))
        return subject.facts_of_text([text for side in sides for text in side])
    pairs = f"{number} of {file or 'random tokens that repeat'}"
    return {name: fact for name, fact in subject.facts.items() if name != "data"} | {"pairs": pairs}


def induction_pairs(subject: Subject, number: int, seed: int = 0) -> Pairs:
    """Random tokens that begin to repeat: "… A B … C D … A" calls for B, the corrupted "… C B … A D … A" for D.

    Both prompts have both answers, at the same positions: what precedes them is all that tells which is right.
    """
    if not isinstance(subject.task, CausalLM):
        reason = "must be given: pairs of random tokens that repeat are made for models of task=causal_lm only"
        raise ArgumentError("clean", None, reason, {"clean": "A cat is", "corrupted": "A dog is"})
    network, tokenizer = subject.network, subject.tokenizer
    left_out = {*tokenizer.special_ids, *tokenizer.missing_ids(network.vocab_size), tokenizer.unk_id}
    words = torch.tensor([index for index in range(network.vocab_size) if index not in left_out])
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


def _pair(
    subject: Subject,
    clean: Text,
    corrupted: Text,
    target: str | None = None,
    answer: str | None = None,
    against: str | None = None,
) -> Pairs:
    first = read_prompt(subject, clean, target, answer, against, "clean")
    second = read_prompt(subject, corrupted, target, against, argument="corrupted")
    sizes = [[part.shape[1] for part in tensors(side.batch).values() if part.ndim > 1] for side in (first, second)]
    if sizes[0] != sizes[1]:
        strings = [subject.tokenizer.token_strings(subject.tokens_of(text)) for text in (clean, corrupted)]
        reason = f"must have as many tokens as the clean prompt, {len(strings[0])}: {strings[0]}; it has {strings[1]}"
        raise ArgumentError("corrupted", corrupted, reason)
    answers, others = first.answers, second.answers if first.against is None else first.against
    if torch.equal(answers, others):
        reason = f'must be another answer than "{_string(subject, int(others))}", that of the clean prompt'
        raise ArgumentError("against", against, reason)
    first, second = (Prompts(side.batch, side.places, answers, others) for side in (first, second))
    return Pairs(first, second)


def _of_file(subject: Subject, file: str) -> list[Pairs]:
    path, pairs = Path(file).expanduser(), []
    if not path.is_file() or path.suffix.lower() not in {*READERS} - {".txt"}:
        raise ArgumentError("file", file, f"is no .csv or .jsonl file with the columns {', '.join(COLUMNS)}")
    with argument_path(passed={"files": "file"}):
        rows = [*read_rows(path, Layout(COLUMNS, arguments=("file",) * len(COLUMNS)))]
    for number, row in enumerate(rows, start=1):
        try:
            pairs.append(_pair(subject, **dict(zip(COLUMNS, (str(value or "") for value in row), strict=True))))
        except ArgumentError as error:
            raise ArgumentError("file", file, f"row {number}: {error.describe().removesuffix('.')}") from None
    if not pairs:
        raise ArgumentError("file", file, "has no pairs")
    return pairs


def _string(subject: Subject, index: int) -> str:
    """A token, or a class, of the logits."""
    if isinstance(subject.task, Classification):
        return subject.task.labels[index]
    return subject.tokenizer.token_strings([index])[0]


def _index(subject: Subject, argument: str, word: str) -> int:
    """The index of a token, or of a class, among the logits."""
    if isinstance(subject.task, Classification):
        require_choice(argument, word, subject.task.labels)
        return subject.task.labels.index(word)
    ids = TextReader(subject.network, subject.tokenizer).rows_of(word, around=False)[0]
    if len(ids) != 1 or ids[0] == subject.tokenizer.unk_id:
        reason = f"must be one token of the vocabulary; it is {subject.tokenizer.token_strings(ids)}"
        raise ArgumentError(argument, word, reason, {argument: subject.tokenizer.decode(ids[:1])})
    return ids[0]


def _together(prompts: Sequence[Prompts]) -> Prompts:
    """Several prompts of one length as one batch."""

    def joined(parts: list[Any]) -> Any:
        return None if parts[0] is None else torch.cat(parts)

    batch = {name: joined([tensors(prompt.batch)[name] for prompt in prompts]) for name in prompts[0].batch}
    others = (joined([getattr(p, name) for p in prompts]) for name in ("places", "answers", "against"))
    return Prompts(cast(Batch, batch), *others)
