"""Text samples, from the `generate` group."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from tinyformer.config.checks import check_value
from tinyformer.data import DataModule, TextTokenizer
from tinyformer.errors import ArgumentError, argument_path, require_at_least
from tinyformer.generation.beam_search import Beam
from tinyformer.generation.sampling import Sampling, generate, stream
from tinyformer.nn import EncoderDecoder, Network, Transformer
from tinyformer.run.summary import indent
from tinyformer.tasks import Seq2Seq, Task
from tinyformer.tasks.user_texts import TextReader

NUM_OUTPUTS = 3
"""Outputs of a split that are printed."""


def check_generation(settings: DictConfig) -> None:
    """Check the `generate` group before training rather than after it.

    Raises:
        ArgumentError: a setting is out of range, or the prompt is not text, or its file cannot be read.
    """
    sampled, searched = ("temperature", "top_k", "top_p"), [field.name for field in fields(Beam)]
    for function, names in ((Sampling, sampled), (generate, ("num_tokens", "seed")), (Beam, searched)):
        for name in names:
            check_value(function, name, settings[name], f"generate.{name}")
    with argument_path("generate"):
        _prompts(settings)
        _sampling(settings)
        make_beam(settings)
        require_at_least(0, {"num_tokens": 200}, num_tokens=settings.num_tokens)


def make_beam(settings: DictConfig) -> Beam:
    """The beam search for targets, from the `generate` group.

    Raises:
        ArgumentError: a setting is out of range.
    """
    return Beam(**{field.name: settings[field.name] for field in fields(Beam)})


def refuse_prompts(settings: DictConfig, task: Task) -> None:
    """Refuse a prompt for a task that cannot generate text.

    Raises:
        ArgumentError: there is a prompt, and the task generates no text.
    """
    for name in ("prompt", "prompt_file"):
        if not task.generates and settings[name] is not None:
            reason = f"{type(task).__name__} cannot generate text; a model trained with task=causal_lm can"
            raise ArgumentError(f"generate.{name}", settings[name], reason, {name: None})


def describe_prompts(
    settings: DictConfig, tokenizer: TextTokenizer, max_seq_len: int, task: Task | None = None
) -> str | None:
    """The line of the summary about prompts longer than the model's context; None if there are none."""
    prompts, part = _prompts(settings), "last"
    if isinstance(task, Seq2Seq):
        part, max_seq_len = "first", max_seq_len - task.special_tokens.around(tokenizer).num_added
    long = [index for index, prompt in enumerate(prompts) if len(tokenizer.encode(prompt)) > max_seq_len]
    names = [f"prompt {index + 1}: " if len(prompts) > 1 else "" for index in long]
    return "\n".join(f"{name}only its {part} {max_seq_len} tokens fit" for name in names) or None


def print_generated(settings: DictConfig, task: Task, network: Network, data: DataModule) -> Any:
    """Print what a model generates; see `print_samples`, `print_completion` and `print_outputs`."""
    if isinstance(task, Seq2Seq):
        assert isinstance(network, EncoderDecoder)
        return print_outputs(settings, task, network, data.tokenizer)
    assert isinstance(network, Transformer)
    completion = data.completion if settings.prompt is None and settings.prompt_file is None else None
    if completion is not None:
        return print_completion(*completion, settings, network, data.tokenizer)
    return print_samples(settings, network, data.tokenizer)


def print_outputs(
    settings: DictConfig, task: Seq2Seq, network: EncoderDecoder, tokenizer: TextTokenizer
) -> str | list[str] | None:
    """Print the target of each prompt; without a prompt, a few sources of the split with reference and output.

    Returns:
        The text; a list of texts where `generate.prompt` is a list; None where nothing was decoded.
    """
    if settings.prompt is None and settings.prompt_file is None:
        shown = task.outputs[:NUM_OUTPUTS]
        for number, one in enumerate(shown, start=1):
            print(f"\nOutput {number} of {len(task.outputs):,}:")
            for name, text in (("source", one.source), ("reference", one.reference), ("output", one.output)):
                print(indent(f"{name:<10} {text}"))
        return [one.output for one in shown] or None
    texts = task.generate(TextReader(network, tokenizer), _prompts(settings))
    for text in texts:
        print(f"\nOutput:\n{indent(text)}")
    return texts if isinstance(settings.prompt, ListConfig) else texts[0]


def print_samples(settings: DictConfig, network: Transformer, tokenizer: TextTokenizer) -> str | list[str]:
    """Print each prompt and its continuation while it is sampled; without a prompt, sample a text from its beginning.

    Prompt `i` is sampled with `generate.seed + i`, as in `tinyformer.generation.sampling.generate`.

    Returns:
        The text; a list of texts where `generate.prompt` is a list.
    """
    prompts, texts = _prompts(settings), []
    for index, prompt in enumerate(prompts):
        heading = "A sample" if len(prompts) == 1 else f"Sample {index + 1} of {len(prompts)}"
        print(f"\n{heading}:")
        texts.append(_print_pieces(_pieces(prompt, settings, settings.seed + index, network, tokenizer)))
    return texts if isinstance(settings.prompt, ListConfig) else texts[0]


def print_completion(
    prompt: str, expected: str, settings: DictConfig, network: Transformer, tokenizer: TextTokenizer
) -> str:
    """Print the start of a text, its end, and the end that the model generates in as many tokens; return the latter."""
    (tokens,) = tokenizer.read([prompt])
    num_tokens, missing = len(tokenizer.encode(expected)), tokenizer.missing_ids(network.encoder.vocab_size)
    sampling = _sampling(settings, missing)
    [new] = generate(network, [tokens], num_tokens, sampling, settings.seed, stop_token=tokenizer.eos_id)
    text = tokenizer.continuation(new, after=tokens)
    print("\nA completion:")
    for name, part in (("prompt", prompt), ("expected", expected), ("generated", text)):
        print(indent(f"{name:<10} {part}"))
    return text


def _pieces(
    prompt: str, settings: DictConfig, seed: int, network: Transformer, tokenizer: TextTokenizer
) -> Iterator[str]:
    """A prompt, then the pieces of its continuation, up to the end of the document."""
    yield prompt
    (tokens,) = tokenizer.read([prompt])
    sampling = _sampling(settings, tokenizer.missing_ids(network.encoder.vocab_size))
    steps = stream(network, [tokens], settings.num_tokens, sampling, seed, stop_token=tokenizer.eos_id)
    yield from tokenizer.pieces((token for (token,) in steps if token is not None), after=tokens)


def _print_pieces(pieces: Iterator[str]) -> str:
    """Print a text, indented, piece by piece."""
    text, printed = "", 0
    for piece in pieces:
        text += piece
        indented = indent(text)  # starts with what is printed already
        print(indented[printed:], end="", flush=True)
        printed = len(indented)
    print()
    return text


def _sampling(settings: DictConfig, suppressed: Sequence[int] = ()) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p, suppressed)


def _prompts(settings: DictConfig) -> list[str]:
    if settings.prompt_file is None:
        prompt = "" if settings.prompt is None else settings.prompt
        return [_text(one) for one in (prompt if isinstance(prompt, ListConfig) else [prompt])]
    if not isinstance(settings.prompt_file, str):
        raise ArgumentError("prompt_file", settings.prompt_file, "is not a path", {"prompt_file": "prompt.txt"})
    path = Path(settings.prompt_file)
    if settings.prompt is not None:
        raise ArgumentError("prompt_file", path, "only one of `prompt` and `prompt_file` can be given")
    if path.exists() and not path.is_file():
        raise ArgumentError("prompt_file", path, "is not a file", {"prompt_file": "prompt.txt"})
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("prompt_file", path, f"cannot be read as UTF-8 text ({error})") from error


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ArgumentError("prompt", prompt, "is not text", {"prompt": str(prompt)})
