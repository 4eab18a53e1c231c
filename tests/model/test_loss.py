"""The loss of each text: by hand, and that of an evaluation."""

import json
from pathlib import Path

import pytest
import torch
from commands import SMALL, Program, results_of

import tinyformer
from model.untrained import LABELS, TEXTS, causal, classifier, masked, reader, translator
from tinyformer.errors import ArgumentError


def test_language_models_by_hand():
    model = causal()
    found = model.loss(TEXTS)
    for row, text in enumerate(TEXTS):
        tokens, _ = model.tokenize(text)
        log_probs = model.logits(text)[0, :-1].log_softmax(-1)
        expected = -log_probs.gather(-1, tokens[0, 1:, None]).mean()
        torch.testing.assert_close(found[row], expected)
    torch.testing.assert_close(model.loss(TEXTS[1]), found[1:2])
    model = masked()
    found = model.loss(TEXTS)
    for row, text in enumerate(TEXTS):
        tokens, _ = model.tokenize(text)
        nats = []
        for position in range(1, tokens.shape[1]):
            others = tokens.clone()
            others[0, position] = model.tokenizer.mask_id
            nats.append(-model.logits(others)[0, position].log_softmax(-1)[tokens[0, position]])
        torch.testing.assert_close(found[row], torch.stack(nats).mean(), atol=1e-5, rtol=1e-5)


def test_the_other_tasks_by_hand():
    model = classifier()
    expected = -model.logits(TEXTS).log_softmax(-1)[range(3), [2, 0, 1]]
    torch.testing.assert_close(model.loss(TEXTS, ["maybe", "no", "yes"]), expected)
    torch.testing.assert_close(model.loss(TEXTS, [2, 0, 1]), expected)
    torch.testing.assert_close(model.loss(TEXTS[1], "no"), expected[1:2])
    model, targets = translator(), ["le chat", "un", "oiseau"]
    found, eos = model.loss(TEXTS, targets), model.tokenizer.eos_id
    for row, (text, target) in enumerate(zip(TEXTS, targets, strict=True)):
        source, predicted = ([*ids, eos] for ids in model.tokenizer.encode_batch([text, target]))
        log_probs = model.network(torch.tensor([source]), torch.tensor([[eos, *predicted[:-1]]])).log_softmax(-1)
        torch.testing.assert_close(found[row], -log_probs[0].gather(-1, torch.tensor(predicted)[:, None]).mean())
        by_ids = model.loss(torch.tensor([source]), [predicted[:-1]])
        torch.testing.assert_close(by_ids, found[row : row + 1])
    model = reader()
    # [eos, w, h, o, eos, a, space, c, a, t]
    scores = model.run("who", "a cat").logits[0].mT
    scores[:, 1:5] = -torch.inf
    expected = -scores.log_softmax(-1)[[0, 1], [7, 9]].mean()
    torch.testing.assert_close(model.loss("who", "a cat", "cat"), expected.view(1))
    first = -scores.log_softmax(-1)[:, 5].mean()  # of the two occurrences
    torch.testing.assert_close(model.loss("who", "a cat", "a"), first.view(1))
    none = -scores.log_softmax(-1)[:, 0].mean()
    torch.testing.assert_close(model.loss(["who", "who"], "a cat", ["cat", ""]), torch.stack([expected, none]))
    # Two windows of 19 and 14 bytes of the context; the second begins behind the answer.
    context = "the cat sat in the tree"
    first, second = model.run("who", context).logits.mT
    first[:, 1:5] = second[:, 1:5] = second[:, 19:] = -torch.inf
    both = first.log_softmax(-1)[[0, 1], [9, 11]].mean(), second.log_softmax(-1)[:, 0].mean()
    torch.testing.assert_close(model.loss("who", context, "cat"), -sum(both).view(1) / 2)


MISTAKES = [
    (causal, ([""],), "len(texts[0])=1: must be more tokens"),
    (causal, (TEXTS, LABELS), "task='CausalLM': takes texts, and nothing else."),
    (masked, (["a", ""],), "len(texts[1])=1: must be more tokens"),
    (classifier, (TEXTS,), "labels=None: must be 3, one for each text; labels=['no', 'no', 'no'] works."),
    (classifier, (TEXTS, ["no", "yes", "perhaps"]), "labels='perhaps': must be one of no, yes, maybe, 0, 1, 2."),
    (classifier, (TEXTS, [0, 1, 3]), "labels=3: must be one of"),
    (translator, (TEXTS,), "targets=(): must be a text, a list of texts, or token ids;"),
    (translator, (TEXTS, ["un"]), "targets=['un']: must be 3, as many as texts."),
    (translator, ("a", "b" * 16), "len(targets[0])=17: must be 1 to 16 tokens, including the special"),
    (reader, ("who", "a cat", "dog"), "answers[0]='dog': must be a part of its context."),
    (reader, (["who", "who"], "a cat", "cat"), "answers='cat': must be 2 texts, one for each question;"),
    (reader, ("who", "a cat", [["cat"]]), "answers=[['cat']]: must be a text; empty"),
    (translator, ("a", [[1.5]]), "targets=[[1.5]]: must be a text, a list of texts, or token ids;"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), MISTAKES)
def test_mistakes(make, arguments, message):
    with pytest.raises(ArgumentError) as caught:
        make().loss(*arguments)
    assert str(caught.value).startswith(message)


def write(path: str, lines: list[str]) -> None:
    Path(path).write_text("\n".join(lines))


WORDS = [f"{n} {n * 7 % 10}" for n in range(60)]
QUESTIONS = [(f"where is {n}?", f"he has {n}, and she has {n + 1} and more" * 2, str(n)) for n in range(10, 32)]


def squad(questions: list[tuple[str, str, str]]) -> str:
    """Questions in the layout of SQuAD."""
    paragraphs = [
        {
            "context": context,
            "qas": [{"question": question, "answers": [{"text": answer, "answer_start": context.index(answer)}]}],
        }
        for question, context, answer in questions
    ]
    return json.dumps({"data": [{"paragraphs": paragraphs}]})


def text_files() -> None:
    Path("train.txt").write_text("the cat sees a bird.\n" * 200)
    Path("other.txt").write_text("a bird sees the cat, naïve as it is")


def labelled_files() -> None:
    write("train.csv", ["text,label", *(f"{word},{index % 2}" for index, word in enumerate(WORDS))])
    write("other.csv", ["text,label", "3 4,0", "5,1", "8 8 8,1"])


def pair_files() -> None:
    write("train.tsv", ["source\ttarget", *(f"{word}\t{word[::-1]}" for word in WORDS)])
    write("other.tsv", ["source\ttarget", "3 4\t5", "7\t8 9 9", "1\t1"])


def question_files() -> None:
    Path("train.json").write_text(squad(QUESTIONS[:20]))  # contexts that a run has read are left out
    Path("other.json").write_text(squad([("where is it?", "it is here", "here"), *QUESTIONS[20:]]))


RUNS = {
    "causal": (text_files, "data=text data.files=train.txt", "other.txt", "loss"),
    "masked": (text_files, "data=text data.files=train.txt task=masked_lm", "other.txt", "pseudo_perplexity"),
    "classification": (
        labelled_files,
        "task=classification data=text data.files=train.csv data.label_column=label",
        "other.csv",
        "loss",
    ),
    "seq2seq": (pair_files, "task=seq2seq data=text data.files=train.tsv", "other.tsv", "loss"),
    "span": (question_files, "task=span data=squad data.files=train.json", "other.json", "loss"),
}
"""Files, a run on them, the file that it is evaluated on, and the measure."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_the_loss_is_that_of_an_evaluation(kind: str, program: Program) -> None:
    make_files, run, other, measure = RUNS[kind]
    make_files()
    ended = program("train.py", SMALL, run, "tokenizer=byte model.max_seq_len=48 hydra.run.dir=run")
    assert ended.code == 0, ended.err
    ended = program(
        "evaluate.py", f"checkpoint=run/checkpoints/last.ckpt data.files={other} split=all hydra.run.dir=evaluated"
    )
    assert ended.code == 0, ended.err
    expected = results_of("evaluated")[f"val/{measure}"]
    model = tinyformer.load("run/checkpoints/last.ckpt")
    if kind in ("causal", "masked"):
        found = model.loss(Path("other.txt").read_text())
        found = found.exp() if kind == "masked" else found
    elif kind == "classification":
        found = model.loss(["3 4", "5", "8 8 8"], ["0", "1", "1"])
    elif kind == "seq2seq":
        targets = ["5", "8 9 9", "1"]
        found, weights = model.loss(["3 4", "7", "1"], targets), torch.tensor([len(target) + 1 for target in targets])
        found = (found * weights).sum() / weights.sum()
    else:
        asked = [("where is it?", "it is here", "here"), *QUESTIONS[20:]]
        windows = [len(model.run(question, context).logits) for question, context, _ in asked]
        assert max(windows) > 1
        found, weights = model.loss(*map(list, zip(*asked, strict=True))), torch.tensor(windows)
        found = (found * weights).sum() / weights.sum()
    assert float(found.mean()) == pytest.approx(expected, abs=1e-5)
