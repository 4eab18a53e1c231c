from .base import DataModule
from .cache import Prepared, TextRecipe
from .copying import CopyDataModule
from .dates import Dates
from .docstring_questions import DocstringQuestions
from .docstrings import Docstrings
from .example_cache import ExampleRecipe
from .examples import Examples, LabelledSplit
from .hub_dataset import HubDataset
from .induction import InductionDataModule
from .labelled import LabelledDataModule
from .loader import EpochLoader, ResumableLoader
from .masking import MaskedWindows, Masker, Masking
from .modular_addition import ModularAdditionDataModule
from .module import TextDataModule, TokenDataModule
from .near_copies import near_copy_groups
from .pairs import PairDataModule, PairRecipe, Pairs, PairSplit
from .pydoc import Pydoc
from .question_module import QuestionDataModule, QuestionRecipe
from .questions import Questions, QuestionSplit, QuestionTexts, tokenise_questions
from .recall import RecallDataModule
from .similar_lengths import SimilarLengthLoader
from .sources import LabelledSource, LocalOrHub, PairSource, QuestionSource, Source
from .special_tokens import PairTokens, SpecialTokens
from .splits import hold_out
from .squad import Question, SquadFiles
from .storage import default_cache_dir
from .stream import TokenSplit
from .summaries import Summaries
from .text_files import TextFiles
from .tokenizer import TextTokenizer
from .tokenizer_recipes import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HubTokenizer,
    MaskedTokenizer,
    TokenizerFile,
    TokenizerRecipe,
)
from .windows import Pack, Windows

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "CopyDataModule",
    "DataModule",
    "Dates",
    "DocstringQuestions",
    "Docstrings",
    "EpochLoader",
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
    "PairRecipe",
    "PairSource",
    "PairSplit",
    "PairTokens",
    "Pairs",
    "Prepared",
    "Pydoc",
    "Question",
    "QuestionDataModule",
    "QuestionRecipe",
    "QuestionSource",
    "QuestionSplit",
    "QuestionTexts",
    "Questions",
    "RecallDataModule",
    "ResumableLoader",
    "SimilarLengthLoader",
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
