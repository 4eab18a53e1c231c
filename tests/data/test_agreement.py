"""Lines and sentences made by rule: a reader who knows the rule finds every key, and no distance or word tells it."""

import itertools
import re
from collections import Counter

import pytest

from tinyformer.data import SETS, AgreementDataModule, make_lines
from tinyformer.data.generated.agreement import ADJECTIVES, CONTEXTS, OBJECTS, SINGULAR

PREPOSITIONS = {"in", "of", "near", "from", "with"}
FITTING = {"adjective_noun": ADJECTIVES, "verb_object": OBJECTS, "context": CONTEXTS}


def words_of(text):
    return re.findall(r"\w+|[,.]", text)


def heads_of_phrases(words):
    """The nouns of a clause that follow no preposition: those that end "the …" where no preposition is before it."""
    phrases = re.findall(r"(\w+ |, |^)the ((?:(?:other|first|large|local|new) )*)(\w+)", " ".join(words))
    return [noun for before, _, noun in phrases if before.strip() not in PREPOSITIONS]


@pytest.mark.parametrize("name", SETS)
def test_the_rule_tells_the_key_and_nothing_else_does(name):
    lines = make_lines(name)
    assert lines == make_lines(name) != make_lines(name, seed=1)
    assert len({line.text for line in lines}) == 200
    distances, keys, others = [], Counter(), Counter()
    for line in lines:
        words = words_of(line.text)
        assert [words.count(word) for word in line[1:]] == [1, 1, 1]
        query, key, distractor = map(words.index, line[1:])
        assert query > max(key, distractor)
        distances.append((query - key, query - distractor))
        keys[line.key] += 1
        others[line.distractor] += 1
        if name in FITTING:
            assert line.key in FITTING[name][line.query]
            assert line.distractor not in FITTING[name][line.query]
        else:  # the subject is the first noun without a preposition, the object the second one
            assert heads_of_phrases(words)[name == "pronoun_noun"] == line.key
            assert line.key.endswith("s") != line.distractor.endswith("s")
            plural = line.query == "they" if name == "pronoun_noun" else not line.query.endswith("s")
            assert line.key.endswith("s") == plural
    for half in (lines[::2], lines[1::2]):  # of which one chooses the head and the other tests it
        assert sum(line.text.index(line.key) > line.text.index(line.distractor) for line in half) == 50
    rules = [sum(abs(a - k) < abs(b - k) for a, b in distances) / 200 for k in range(-20, 20)]
    assert max(rules) < 0.65
    assert sum((keys & others).values()) > 120  # the same words are keys and distractors


def module_of(**changes):
    numbers = {"num_sequences": 300, "num_validation_sequences": 40, "batch_size": 8, "max_seq_len": 32}
    module = AgreementDataModule(**numbers | changes)
    module.prepare()
    return module


def test_the_scored_words_agree_with_their_nouns():
    module, same = module_of(), Counter()
    for tokens in module.splits.values():
        for begin, end in itertools.pairwise(tokens.offsets):
            words = words_of(module.tokenizer.decode(tokens.ids[begin + 1 : end]))
            scored = [words[at] for at in tokens.scored[begin + 1 : end].nonzero()[0]]
            subject, object_ = heads_of_phrases(words)
            assert scored == [("has", "have")[subject.endswith("s")], ("it", "they")[object_.endswith("s")]]
            nouns = [noun for noun in words if noun.removesuffix("s") in SINGULAR]
            assert len({noun.removesuffix("s") for noun in nouns}) == 4
            same[len({noun.endswith("s") for noun in nouns[:2]})] += 1
    assert same[1] / same.total() == pytest.approx(0.5, abs=0.1)  # another noun has the number in half of the sentences
    encode = module.tokenizer.encode
    assert encode("the keys have cats") == [*encode("the keys have"), module.tokenizer.unk_id]


def test_the_lines_are_sentences_of_the_task():
    tokenizer = module_of().tokenizer
    for line in (*make_lines("subject_verb"), *make_lines("pronoun_noun")):
        assert tokenizer.decode(tokenizer.encode(line.text)) == line.text
