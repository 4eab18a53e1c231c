"""The loss of each text: by hand, and that of an evaluation."""

import json
from pathlib import Path

import pytest
import torch
from commands import SMALL, Program, results_of

import tinyformer
from model.models import TEXTS, answerer, causal, classifier, masked, translator


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
    model = answerer()
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


QUESTIONS = [(f"where is {n}?", f"he has {n}, and she has {n + 1} and more" * 2, str(n)) for n in range(10, 32)]
ASKED = [("where is it?", "it is here", "here"), *QUESTIONS[20:]]


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


PAIRS = "\n".join(["source\ttarget", *(f"{n} {n * 7 % 10}\t{n % 10} {n}" for n in range(60))])
RUNS = {
    "data=text": ("the cat sees a bird.\n" * 200, "a bird sees the cat, naïve as it is"),
    "task=seq2seq data=text": (PAIRS, "source\ttarget\n3 4\t5\n7\t8 9 9\n1\t1"),
    "task=span data=squad": (squad(QUESTIONS[:20]), squad(ASKED)),  # contexts that a run has read are left out
}
"""The text of a run, and the text that it is evaluated on."""


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_the_loss_is_that_of_an_evaluation(task: str, program: Program) -> None:
    suffix = {"data=text": "txt", "task=seq2seq data=text": "tsv"}.get(task, "json")
    for name, text in zip(("train", "other"), RUNS[task], strict=True):
        Path(f"{name}.{suffix}").write_text(text)
    settings = "tokenizer=byte model.max_seq_len=48 hydra.run.dir=run"
    ended = program("train.py", SMALL, task, f"data.files=train.{suffix}", settings)
    assert ended.code == 0, ended.err
    checkpoint, data = "run/checkpoints/last.ckpt", f"data.files=other.{suffix} split=all hydra.run.dir=evaluated"
    ended = program("evaluate.py", f"checkpoint={checkpoint}", data)
    assert ended.code == 0, ended.err
    model = tinyformer.load(checkpoint)
    if suffix == "txt":
        losses, targets = model.loss(RUNS[task][1]), [1]
    elif suffix == "tsv":
        losses, targets = model.loss(["3 4", "7", "1"], ["5", "8 9 9", "1"]), [2, 6, 2]
    else:
        losses = model.loss(*map(list, zip(*ASKED, strict=True)))
        targets = [len(model.run(question, context).logits) for question, context, _ in ASKED]  # windows
        assert max(targets) > 1
    mean = (losses * torch.tensor(targets)).sum() / sum(targets)
    assert mean.item() == pytest.approx(results_of("evaluated")["val/loss"], abs=1e-5)
