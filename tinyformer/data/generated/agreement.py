"""Generated sentences in which one word belongs to another: lines for analyses, and a task for training."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinyformer.data.generated.module import ABSENT, Drawn, RandomDataModule
from tinyformer.data.tokenizer.tokenizer import EOS, UNK, TextTokenizer

Matches = Mapping[str, Sequence[str]]
"""For each query word, such as a verb, the key words that it may belong to, such as its subjects."""

SINGULAR = ("file", "key", "server", "table", "string", "method", "module", "object", "folder", "value", "list", "name")
PLURAL = tuple(f"{noun}s" for noun in SINGULAR)
VERBS: Matches = {
    form: nouns
    for verb in ("need", "return", "call", "show", "use")
    for form, nouns in ((f"{verb}s", SINGULAR), (verb, PLURAL))
}
HAVE: Matches = {"has": SINGULAR, "have": PLURAL}
PRONOUNS: Matches = {"it": SINGULAR, "they": PLURAL}
ADJECTIVES: Matches = {  # adjectives, and the nouns before them
    "empty": ("list", "folder", "string", "queue"),
    "closed": ("socket", "stream", "connection", "file"),
    "callable": ("function", "method", "class"),
    "negative": ("number", "index", "integer", "offset"),
    "optional": ("argument", "parameter", "keyword"),
    "abstract": ("class", "method", "base"),
}
OBJECTS: Matches = {  # nouns, and the verbs whose object they are
    "file": ("open", "close", "read", "write"),
    "exception": ("raise", "catch"),
    "function": ("call", "define", "wrap"),
    "list": ("sort", "append", "reverse"),
    "string": ("format", "split", "encode"),
    "module": ("import", "load"),
    "socket": ("connect", "bind"),
}
CONTEXTS: Matches = {  # words of several meanings, and words that disambiguate them
    "bank": ("river", "money", "loan"),
    "key": ("lock", "dictionary", "password"),
    "port": ("ship", "socket", "server"),
    "tree": ("forest", "node", "parser"),
    "table": ("kitchen", "database", "column"),
    "string": ("guitar", "character", "text"),
    "shell": ("beach", "command", "script"),
    "thread": ("needle", "process", "lock"),
}

FILLERS = {  # for each slot: minimum and maximum number of words, and the words
    "A": (0, 2, ("other", "first", "large", "local", "new")),
    "P": (1, 1, ("in", "of", "near", "from", "with")),
    "ADV": (1, 2, ("also", "often", "still", "now")),
}
PHRASES = ("the A KEY P the A DISTRACTOR", "P the A DISTRACTOR , the A KEY")  # nearer: the distractor, then the key
SENTENCES = [
    f"{subject} ADV QUERY {object_} , so QUERY2 changed ."
    for subject in PHRASES
    for object_ in (phrase.replace("KEY", "KEY2").replace("DISTRACTOR", "DISTRACTOR2") for phrase in PHRASES)
]
LONGEST = 28  # words of a sentence

SETS: dict[str, tuple[Sequence[str], Matches, Matches, str]] = {
    "subject_verb": (SENTENCES, VERBS, PRONOUNS, ""),
    "pronoun_noun": (SENTENCES, HAVE, PRONOUNS, "2"),
    "adjective_noun": ([f"{phrase} ADV is QUERY ." for phrase in PHRASES], ADJECTIVES, {}, ""),
    "verb_object": (
        [
            "you ADV KEY , before you DISTRACTOR ADV , the A QUERY .",
            "before you DISTRACTOR ADV , you ADV KEY the A QUERY .",
        ],
        *(OBJECTS, {}, ""),
    ),
    "context": ([f"{phrase} ADV has a QUERY ." for phrase in PHRASES], CONTEXTS, {}, ""),
}
"""For each name: templates, the matches of their first and second query, and the suffix of the query in `Line`."""


class Line(NamedTuple):
    """A text whose query belongs to its key, not to its distractor; all three are words, or phrases ("jumps over")."""

    text: str
    query: str
    key: str
    distractor: str


def make_lines(name: str, number: int = 200, seed: int = 0) -> list[Line]:
    """Make distinct lines of one of `SETS`, in which neither distance nor vocabulary tells key and distractor apart.

    In half of the lines, the key is nearer to the query than the distractor; both are drawn from the same words.
    """
    rng, made = random.Random(f"{name} {seed}"), dict[str, Line]()
    templates, *matches, which = SETS[name]
    while len(made) < number:
        words = _words(matches, rng)
        text = " ".join(word for _, word in _fill(templates[len(made) // 2 % len(templates)], words, rng))
        text = text.replace(" ,", ",").replace(" .", ".")
        made[text] = Line(text, *(words[f"{slot}{which}"] for slot in ("QUERY", "KEY", "DISTRACTOR")))
    return list(made.values())


def _words(matches: Sequence[Matches], rng: random.Random) -> dict[str, str]:
    """Draw query, key and distractor of each relation; the query matches the key only. No noun occurs twice."""
    words: dict[str, str] = {}
    for number, of_queries in zip(("", "2"), filter(None, matches), strict=False):
        words[f"QUERY{number}"] = query = rng.choice([*of_queries])
        others = {word: None for words in of_queries.values() for word in words if word not in of_queries[query]}
        for slot, nouns in (("KEY", of_queries[query]), ("DISTRACTOR", others)):
            taken = {word.removesuffix("s") for word in words.values()}
            words[f"{slot}{number}"] = rng.choice([noun for noun in nouns if noun.removesuffix("s") not in taken])
    return words


def _fill(template: str, words: Mapping[str, str], rng: random.Random) -> list[tuple[str, str]]:
    """Fill the slots of a template; return each slot with a word, in order."""
    filled = []
    for slot in template.split():
        least, most, fillers = FILLERS.get(slot, (1, 1, (words.get(slot, slot),)))
        filled += [(slot, word) for word in rng.sample(fillers, rng.randint(least, most))]
    return filled


class AgreementDataModule(RandomDataModule):
    """Sentences in which the verb agrees with the subject, and the pronoun with the object, despite another noun.

    "near the local servers , the key also has the new tables of the file , so they changed ." As in Linzen et al. 2016
    (arXiv 1611.01368), the other noun is between the words that agree, or before both. It follows a preposition, and
    differs in number (singular or plural) in half of the cases. The verb (has, have) and the pronoun (it, they) are the
    only scored targets. `make_lines("subject_verb")` and `make_lines("pronoun_noun")` make such sentences for
    `analysis=relations`; there, the other noun always differs. `settings` are arguments of `RandomDataModule`.
    """

    name, alphabet_argument = "agreement", "tokenizer"

    def __init__(self, *, tokenizer: TextTokenizer | None = None, **settings: Any) -> None:
        fixed = {word for sentence in SENTENCES for word in sentence.split() if not word.isupper()}
        fixed.update(*(fillers for *_, fillers in FILLERS.values()))
        words = sorted({*fixed, *SINGULAR, *PLURAL, *HAVE, *VERBS, *PRONOUNS})
        self._index = {word: index for index, word in enumerate(words)}
        settings |= {"symbols": words, "identity": [SENTENCES], "tokenizer": tokenizer or word_tokenizer(words)}
        super().__init__(LONGEST + 1, **settings)

    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        rng = random.Random(int(generator.integers(2**63)))
        symbols, scored = np.full((number, LONGEST), ABSENT, np.int16), np.zeros((number, LONGEST), bool)
        for row in range(number):
            words = _words((HAVE, PRONOUNS), rng)
            for slot in ("DISTRACTOR", "DISTRACTOR2"):
                words[slot] = words[slot].removesuffix("s") + rng.choice(("", "s"))
            filled = _fill(rng.choice(SENTENCES), words, rng)
            symbols[row, : len(filled)] = [self._index[word] for _, word in filled]
            scored[row, : len(filled)] = [slot.startswith("QUERY") for slot, _ in filled]
        return Drawn(symbols, scored)


def word_tokenizer(words: Sequence[str]) -> TextTokenizer:
    """A tokenizer with one token for each of `words`, which may be punctuation marks."""
    vocabulary = {token: index for index, token in enumerate([UNK, EOS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens([EOS])
    return TextTokenizer(tokenizer, EOS)
