"""Prompts with the token to predict, pairs of them, and what a user types wrong."""

import re

import pytest
import torch
from model.models import causal, classifier, masked, translator

from tinyformer.analysis import AnalysisContext
from tinyformer.analysis.causes.prompts import PairAnalysis, induction_pairs, read_prompt
from tinyformer.errors import ArgumentError


def context_of(some):
    return AnalysisContext(some.network, [], some.task, some.tokenizer)


PROMPTS = {
    causal: ("abc", {}, (["abc"],), -1),
    masked: ("a<mask>c", {}, (["a<mask>c"],), 2),
    classifier: ("abc", {}, (["abc"],), ...),
    translator: ("abc", {"target": "de"}, (["abc"], ["de"]), 2),
}


@pytest.mark.parametrize("make", PROMPTS)
def test_the_score_is_the_logit_of_the_answer_minus_that_of_another(make):
    (text, target, texts, place), some = PROMPTS[make], make()
    context, logits = context_of(some), some.logits(*texts)[0, place]
    predicted = read_prompt(context, text, **target)
    assert predicted.answers.item() == logits.argmax()
    torch.testing.assert_close(predicted.run(context)[0], logits.max().unsqueeze(0))
    words = ("yes", "no") if make is classifier else ("d", "e")
    prompts = read_prompt(context, text, **target, answer=words[0], against=words[1])
    ids = [*map(some.task.labels.index, words)] if make is classifier else some.tokenizer.encode("de")
    torch.testing.assert_close(prompts.run(context)[0], (logits[ids[0]] - logits[ids[1]]).unsqueeze(0))
    assert prompts.title(context) == f'"{words[0]}" minus "{words[1]}"'


@pytest.mark.parametrize("max_seq_len", [6, 16, 40])
def test_random_tokens_call_for_what_followed_the_earlier_occurrence_of_the_last(max_seq_len):
    context = context_of(causal(max_seq_len=max_seq_len))
    pairs = induction_pairs(context, 5)
    for row in range(5):
        clean, corrupted = (side.batch["inputs"][row].tolist() for side in (pairs.clean, pairs.corrupted))
        assert len(clean) == len(corrupted) == min(25, max_seq_len)
        for tokens, answer in ((clean, pairs.clean.answers[row]), (corrupted, pairs.clean.against[row])):
            assert (tokens.count(tokens[-1]), tokens.count(answer)) == (2, 1)
            assert [token for token in tokens if token in (0, 1)] == tokens[:1]  # <unk>, and the <eos> before a text
            assert tokens[tokens.index(tokens[-1]) + 1] == answer
        differing = [at for at, (one, other) in enumerate(zip(clean, corrupted, strict=True)) if one != other]
        assert [pairs.roles[at] for at in differing] == ["A/C", "C/A"]
        assert sorted(clean) == sorted(corrupted)
    assert torch.equal(pairs.clean.batch["inputs"], induction_pairs(context, 5).clean.batch["inputs"])


def test_pairs_of_a_file_are_read_by_length(tmp_path):
    context, file = context_of(causal()), tmp_path / "pairs.csv"
    file.write_text("clean,corrupted,answer,against\nab,ac,d,e\nabc,abd,f,g\nbb,bc,,h\n")
    (first, second), encode = PairAnalysis(file=str(file)).pairs(context), context.tokenizer.encode
    assert first.corrupted.batch["inputs"][:, 1:].tolist() == [encode("ac"), encode("bc")]
    assert second.clean.batch["inputs"][:, 1:].tolist() == [encode("abc")]
    assert first.clean.answers.tolist() == [*encode("d"), read_prompt(context, "bb").answers.item()]
    assert first.corrupted.against.tolist() == encode("eh")


PAIR = {"clean": "ab", "corrupted": "ac"}
MISTAKES = [
    (causal, {"clean": "ab"}, "corrupted='': must be one text"),
    (causal, PAIR | {"corrupted": "abc"}, "corrupted='abc': must have as many tokens as the clean prompt, 3: "),
    (causal, PAIR | {"answer": "ab"}, "answer='ab': must be one token of the vocabulary; it is ['a', 'b']"),
    (causal, PAIR | {"against": "é"}, "against='é': must be one token of the vocabulary; it is ['<unk>']"),
    (causal, PAIR | {"answer": "a", "against": "a"}, "against='a': must be another answer than \"a\""),
    (causal, {"clean": "a" * 20, "corrupted": "b" * 20}, "len(clean)=21: must be 1 to 16 tokens"),
    (causal, {"file": "no.csv"}, "file='no.csv': is no .csv or .jsonl file with the columns clean, corrupted, answer"),
    (causal, {"file": "a.csv"}, "file='a.csv': row 2: corrupted='abc': must have as many tokens as the clean"),
    (causal, {"file": "b.csv"}, "file='b.csv': has no column answer; it has clean, corrupted"),
    (masked, PAIR, "clean='<eos>ab': must contain one <mask>, which the model predicts"),
    (classifier, PAIR | {"answer": "si"}, "answer='si': must be one of no, yes, maybe"),
    (
        classifier,
        {},
        "clean=None: must be given: the default, prompts of random tokens that repeat, is for models of task=",
    ),
]


@pytest.mark.parametrize(("make", "arguments", "message"), MISTAKES)
def test_mistakes_are_told(make, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = "clean,corrupted,answer,against\n"
    for name, text in {"a": columns + "ab,ac,a,b\nab,abc,,\n", "b": "clean,corrupted\na,b\n"}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        PairAnalysis(**arguments).pairs(context_of(make()))
