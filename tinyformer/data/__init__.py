"""Text in, batches of token ids out."""

from tinyformer.batch import IGNORED, Batch
from tinyformer.data.base import DataModule
from tinyformer.data.cache import PreparedText, TextRecipe
from tinyformer.data.copying import CopyDataModule
from tinyformer.data.dates import Dates
from tinyformer.data.docstring_questions import DocstringQuestions
from tinyformer.data.docstrings import Docstrings
from tinyformer.data.example_cache import ExampleRecipe, PreparedExamples
from tinyformer.data.examples import ExampleLoader, Examples, LabelledSplit
from tinyformer.data.hub_dataset import HubDataset
from tinyformer.data.induction import InductionDataModule
from tinyformer.data.labelled import LabelledDataModule
from tinyformer.data.loader import EpochLoader, ResumableLoader
from tinyformer.data.masking import MaskedWindows, Masker, Masking
from tinyformer.data.modular_addition import ModularAdditionDataModule
from tinyformer.data.module import TextDataModule, TokenDataModule
from tinyformer.data.near_copies import near_copy_groups
from tinyformer.data.pairs import PairDataModule, PairLoader, PairRecipe, Pairs, PairSplit
from tinyformer.data.pydoc import Pydoc
from tinyformer.data.question_module import QuestionDataModule, QuestionRecipe
from tinyformer.data.questions import QuestionLoader, Questions, QuestionSplit, QuestionTexts, tokenise_questions
from tinyformer.data.recall import RecallDataModule
from tinyformer.data.sources import LabelledSource, LocalOrHub, PairSource, QuestionSource, Source
from tinyformer.data.special_tokens import PairTokens, SpecialTokens
from tinyformer.data.splits import hold_out
from tinyformer.data.squad import Question, SquadFiles
from tinyformer.data.storage import default_cache_dir
from tinyformer.data.stream import TokenSplit
from tinyformer.data.summaries import Summaries
from tinyformer.data.text_files import TextFiles
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HubTokenizer,
    MaskedTokenizer,
    TokenizerFile,
    TokenizerRecipe,
)
from tinyformer.data.windows import Pack, Windows

__all__ = [
    "IGNORED",
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "CharTokenizer",
    "CopyDataModule",
    "DataModule",
    "Dates",
    "DocstringQuestions",
    "Docstrings",
    "EpochLoader",
    "ExampleLoader",
    "ExampleRecipe",
    "Examples",
    "HubDataset",
    "HubTokenizer",
    "InductionDataModule",
    "LabelledDataModule",
    "LabelledSource",
    "LabelledSplit",
    "LocalOrHub",
    "MaskedTokenizer",
    "MaskedWindows",
    "Masker",
    "Masking",
    "ModularAdditionDataModule",
    "Pack",
    "PairDataModule",
    "PairLoader",
    "PairRecipe",
    "PairSource",
    "PairSplit",
    "PairTokens",
    "Pairs",
    "PreparedExamples",
    "PreparedText",
    "Pydoc",
    "Question",
    "QuestionDataModule",
    "QuestionLoader",
    "QuestionRecipe",
    "QuestionSource",
    "QuestionSplit",
    "QuestionTexts",
    "Questions",
    "RecallDataModule",
    "ResumableLoader",
    "Source",
    "SpecialTokens",
    "SquadFiles",
    "Summaries",
    "TextDataModule",
    "TextFiles",
    "TextRecipe",
    "TextTokenizer",
    "TokenDataModule",
    "TokenSplit",
    "TokenizerFile",
    "TokenizerRecipe",
    "Windows",
    "default_cache_dir",
    "hold_out",
    "near_copy_groups",
    "tokenise_questions",
]
