"""The texts that a model generates at the end of a run, from the `generate` group."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tinyformer.config.errors import indent
from tinyformer.data import DataModule, TextTokenizer
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.generation.generation import Beam, Sampling, ends, generate, require_amount, stream
from tinyformer.nn import EncoderDecoder, Network, Transformer
from tinyformer.tasks import Seq2Seq, Task
from tinyformer.tasks.user_texts import TextReader

NUM_OUTPUTS = 3  # outputs of a split that are printed


@dataclass(frozen=True)
class Generation:
    """The `generate` group, whose comments describe its values."""

    prompt: str | list[str] | None = None
    prompt_file: str | None = None
    num_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    stop: str | list[str] | None = None
    beams: int = 4
    length_penalty: float = 1.0
    length_offset: float = 0.0

    def __post_init__(self) -> None:
        require_amount(self.num_tokens, self.seed, self.num_return_sequences, self.stops)
        _ = self.prompts, self.sampling(), self.beam  # raise where their values cannot be

    @functools.cached_property
    def prompts(self) -> list[str]:
        """The prompts; one that is empty where none is given."""
        if self.prompt_file is None:
            return self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]
        path = Path(self.prompt_file)
        if self.prompt is not None:
            raise ArgumentError("prompt_file", path, "only one of `prompt` and `prompt_file` can be given")
        try:
            return [path.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("prompt_file", path, f"cannot be read as UTF-8 text ({error})") from error

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text.replace(r"\n", "\n") for text in given]  # a shell passes on \n as it is typed

    @property
    def has_prompt(self) -> bool:
        return self.prompt is not None or self.prompt_file is not None

    def sampling(self, suppressed: Sequence[int] = ()) -> Sampling:
        """The rule of sampling, without the tokens that are suppressed."""
        return Sampling(self.temperature, self.top_k, self.top_p, suppressed, self.repetition_penalty)

    @functools.cached_property
    def beam(self) -> Beam:
        return Beam(self.beams, self.length_penalty, self.length_offset)

    def refuse_prompt(self, reason: str, can_be_left_out: bool = False) -> None:
        for name in ("prompt", "prompt_file"):
            if (value := getattr(self, name)) is not None:
                raise ArgumentError(name, value, reason, {name: None} if can_be_left_out else None)

    def of(self, texts: list[str]) -> str | list[str]:
        """The texts of the prompts in the form of `prompt`: a list, or one text."""
        return texts if isinstance(self.prompt, list) or len(texts) > 1 else texts[0]


def make_generation(group: Mapping[str, Any]) -> Generation:
    """The settings of the `generate` group."""
    with argument_path("generate"):
        return Generation(**group)


def describe_prompts(
    generation: Generation, tokenizer: TextTokenizer, max_seq_len: int, task: Task | None = None
) -> str | None:
    """The line of the summary about prompts longer than the model's context; None if there are none."""
    prompts, part = generation.prompts, "last"
    if isinstance(task, Seq2Seq):
        part, max_seq_len = "first", max_seq_len - task.special_tokens.around(tokenizer).num_added
    long = [index for index, prompt in enumerate(prompts) if len(tokenizer.encode(prompt)) > max_seq_len]
    names = [f"prompt {index + 1}: " if len(prompts) > 1 else "" for index in long]
    return "\n".join(f"{name}only its {part} {max_seq_len} tokens fit" for name in names) or None


def print_generated(generation: Generation, task: Task, network: Network, data: DataModule) -> Any:
    """Print what a model generates; see `print_outputs`, `print_completion` and `print_samples`."""
    if isinstance(task, Seq2Seq):
        assert isinstance(network, EncoderDecoder)
        return print_outputs(generation, task, network, data.tokenizer)
    assert isinstance(network, Transformer)
    if data.completion is not None and not generation.has_prompt:
        return print_completion(*data.completion, generation, network, data.tokenizer)
    return print_samples(generation, network, data.tokenizer)


def print_outputs(
    generation: Generation, task: Seq2Seq, network: EncoderDecoder, tokenizer: TextTokenizer
) -> str | list[str] | None:
    """Print the target of each prompt; without a prompt, a few sources of the split with reference and output."""
    if not generation.has_prompt:
        shown = task.outputs[:NUM_OUTPUTS]
        for number, output in enumerate(shown, start=1):
            print(f"\nOutput {number} of {len(task.outputs):,}:")
            print_named(source=output.source, reference=output.reference, output=output.output)
        return [output.output for output in shown] or None
    reader = TextReader(network, tokenizer)
    texts = list(map(tokenizer.decode, task.generate(reader, task.prompts(reader, generation.prompts))))
    for text in texts:
        print(f"\nOutput:\n{indent(text)}")
    return generation.of(texts)


def print_samples(generation: Generation, network: Transformer, tokenizer: TextTokenizer) -> str | list[str]:
    """Print each prompt and its continuation while it is sampled; without a prompt, sample a text from its beginning.

    Prompt `i` is sampled with `generate.seed + i`, as in `tinyformer.generation.generation.generate`.
    """
    prompts, texts = [text for text in generation.prompts for _ in range(generation.num_return_sequences)], list[str]()
    sampling = generation.sampling(tokenizer.missing_ids(network.encoder.vocab_size))
    for seed, prompt in enumerate(prompts, generation.seed):
        heading = "A sample" if len(prompts) == 1 else f"Sample {len(texts) + 1} of {len(prompts)}"
        print(f"\n{heading}:")
        (tokens,) = tokenizer.read([prompt])
        steps = stream(network, [tokens], generation.num_tokens, sampling, seed, **ends(tokenizer, generation.stops))
        pieces = tokenizer.pieces((token for (token,) in steps if token is not None), after=tokens)
        texts.append(_print_pieces(itertools.chain([prompt], pieces)))
    return generation.of(texts)


def print_completion(
    prompt: str, expected: str, generation: Generation, network: Transformer, tokenizer: TextTokenizer
) -> str:
    """Print the start of a text, its end, and the end that the model generates in as many tokens; return the latter."""
    (tokens,), num_tokens = tokenizer.read([prompt]), len(tokenizer.encode(expected))
    sampling = generation.sampling(tokenizer.missing_ids(network.encoder.vocab_size))
    [new] = generate(network, [tokens], num_tokens, sampling, generation.seed, **ends(tokenizer, generation.stops))
    text = tokenizer.continuation(new, after=tokens)
    print("\nA completion:")
    print_named(prompt=prompt, expected=expected, generated=text)
    return text


def print_named(**texts: str) -> None:
    """Print texts, indented, each after its name."""
    for name, text in texts.items():
        print(indent(f"{name:<10} {text}"))


def _print_pieces(pieces: Iterator[str]) -> str:
    if Console().is_jupyter:  # where each piece would be an output of its own
        pieces = iter(["".join(pieces)])
    text, printed = "", 0
    for piece in pieces:
        text += piece
        indented = indent(text)  # starts with what is printed already
        print(indented[printed:], end="", flush=True)
        printed = len(indented)
    print()
    return text
