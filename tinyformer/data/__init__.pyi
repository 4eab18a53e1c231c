from .base import DataModule
from .batches.loader import EpochLoader, ResumableLoader
from .batches.masking import MaskedWindows, Masker, Masking
from .batches.similar_lengths import SimilarLengthLoader
from .batches.windows import Pack, Windows
from .cache import Prepared, TextRecipe
from .example_cache import ExampleRecipe
from .examples import Examples, LabelledSplit
from .generated.copying import CopyDataModule
from .generated.induction import InductionDataModule
from .generated.modular_addition import ModularAdditionDataModule
from .generated.recall import RecallDataModule
from .labelled import LabelledDataModule
from .module import TextDataModule, TokenDataModule
from .near_copies import near_copy_groups
from .pairs import PairDataModule, PairRecipe, Pairs, PairSplit
from .question_module import QuestionDataModule, QuestionRecipe
from .questions import Questions, QuestionSplit, QuestionTexts, tokenise_questions
from .sources.dates import Dates
from .sources.docstring_questions import DocstringQuestions
from .sources.hub_dataset import HubDataset
from .sources.pydoc import Docstrings, Pydoc, Summaries
from .sources.source import LabelledSource, LocalOrHub, PairSource, QuestionSource, Source
from .sources.squad import Question, SquadFiles
from .sources.text_files import TextFiles
from .splits import hold_out
from .storage import default_cache_dir
from .stream import TokenSplit
from .tokenizer.recipes import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HubTokenizer,
    MaskedTokenizer,
    TokenizerFile,
    TokenizerRecipe,
)
from .tokenizer.special_tokens import PairTokens, SpecialTokens
from .tokenizer.tokenizer import TextTokenizer

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
