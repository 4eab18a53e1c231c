from .batches.loader import EpochLoader, ResumableLoader, SimilarLengthLoader
from .batches.masking import MaskedWindows, Masker, Masking
from .batches.windows import Pack, Windows
from .examples import ExampleFormat, Examples, LabelledSplit
from .generated.agreement import SETS, AgreementDataModule, Line, make_lines
from .generated.module import GeneratedDataModule
from .generated.sequences import (
    BigramBackcopyDataModule,
    CopyDataModule,
    InductionDataModule,
    ModularAdditionDataModule,
    RecallDataModule,
)
from .module import DataModule, SourceDataModule
from .pairs import PairFormat, Pairs, PairSplit, PairTokens, SpecialTokens
from .questions import QuestionFormat, Questions, QuestionSplit, QuestionTexts, tokenise_questions
from .recipe import Recipe
from .row_format import RowFormat, WindowFormat
from .sources.dates import Dates
from .sources.documents import LocalOrHub, Source
from .sources.hub_dataset import HubDataset
from .sources.pydoc import Docstrings, Pydoc, Summaries
from .sources.squad import DocstringQuestions, Question, SquadFiles
from .sources.text_files import TextFiles
from .splits import hold_out, near_copy_groups
from .stream import Prepared, TokenSplit, default_cache_dir
from .tokenizer.recipes import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HubTokenizer,
    TokenizerFile,
    TokenizerRecipe,
)
from .tokenizer.tokenizer import TextTokenizer

__all__ = [
    "SETS",
    "AgreementDataModule",
    "BPETokenizer",
    "BigramBackcopyDataModule",
    "ByteTokenizer",
    "CharTokenizer",
    "CopyDataModule",
    "DataModule",
    "Dates",
    "DocstringQuestions",
    "Docstrings",
    "EpochLoader",
    "ExampleFormat",
    "Examples",
    "GeneratedDataModule",
    "HubDataset",
    "HubTokenizer",
    "InductionDataModule",
    "LabelledSplit",
    "Line",
    "LocalOrHub",
    "MaskedWindows",
    "Masker",
    "Masking",
    "ModularAdditionDataModule",
    "Pack",
    "PairFormat",
    "PairSplit",
    "PairTokens",
    "Pairs",
    "Prepared",
    "Pydoc",
    "Question",
    "QuestionFormat",
    "QuestionSplit",
    "QuestionTexts",
    "Questions",
    "RecallDataModule",
    "Recipe",
    "ResumableLoader",
    "RowFormat",
    "SimilarLengthLoader",
    "Source",
    "SourceDataModule",
    "SpecialTokens",
    "SquadFiles",
    "Summaries",
    "TextFiles",
    "TextTokenizer",
    "TokenSplit",
    "TokenizerFile",
    "TokenizerRecipe",
    "WindowFormat",
    "Windows",
    "default_cache_dir",
    "hold_out",
    "make_lines",
    "near_copy_groups",
    "tokenise_questions",
]
