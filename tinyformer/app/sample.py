"""Text samples, from the `generate` group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from tinyformer.app.checks import check_value
from tinyformer.app.summary import indent
from tinyformer.data import TextTokenizer
from tinyformer.errors import argument_path
from tinyformer.generation import Sampling, generate, stream
from tinyformer.nn import Transformer
from tinyformer.tasks import Task


def print_samples(settings: DictConfig, network: Transformer, tokenizer: TextTokenizer) -> str | list[str]:
    """Print each prompt and what the model makes of it, as it is drawn; without a prompt, a text from its beginning.

    Prompt `i` draws with `generate.seed + i`, as one of several does in `generate`.

    Returns:
        The text; a list of texts where `generate.prompt` is a list.

    Raises:
        ValueError: a setting is out of its range, or the prompt's file cannot be read.
    """
    prompts, texts = _prompts(settings), []
    for index, prompt in enumerate(prompts):
        heading = "A sample" if len(prompts) == 1 else f"Sample {index + 1} of {len(prompts)}"
        print(f"\n{heading}:")
        texts.append(_print_pieces(_pieces(prompt, settings, settings.seed + index, network, tokenizer)))
    return texts if isinstance(settings.prompt, ListConfig) else texts[0]


def refuse_prompts(settings: DictConfig, task: Task) -> None:
    """Refuse to go on from a prompt with a model that cannot.

    Raises:
        ValueError: there is a prompt, and the task generates no text.
    """
    if not task.generates and (settings.prompt, settings.prompt_file) != (None, None):
        raise ValueError(
            f"generate.prompt={settings.prompt or settings.prompt_file}: a model of {type(task).__name__} goes on from "
            "no text; generate.prompt=null works, and so does a model trained with task=causal_lm."
        )


def describe_prompts(settings: DictConfig, tokenizer: TextTokenizer, max_seq_len: int) -> str | None:
    """The line of the summary about prompts that are longer than what the model sees, if there are any."""
    prompts = _prompts(settings)
    long = [index for index, prompt in enumerate(prompts) if len(tokenizer.encode(prompt)) > max_seq_len]
    names = [f"prompt {index + 1}: " if len(prompts) > 1 else "" for index in long]
    return "\n".join(f"{name}only its last {max_seq_len} tokens fit" for name in names) or None


def check_generation(settings: DictConfig) -> None:
    """Refuse bad settings now, and not when the model is trained.

    Raises:
        ValueError: see `print_samples`.
    """
    for function, names in ((Sampling, ("temperature", "top_k", "top_p")), (generate, ("num_tokens", "seed"))):
        for name in names:
            check_value(function, name, settings[name], f"generate.{name}")
    _prompts(settings)
    _sampling(settings)
    if settings.num_tokens < 0:
        raise ValueError(f"generate.num_tokens={settings.num_tokens} is negative; generate.num_tokens=200 works.")


def _pieces(
    prompt: str, settings: DictConfig, seed: int, network: Transformer, tokenizer: TextTokenizer
) -> Iterator[str]:
    """A prompt, and the text behind it as it is drawn, up to where another document would begin."""
    yield prompt
    tokens = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    steps = stream(network, [tokens], settings.num_tokens, _sampling(settings), seed, stop_token=tokenizer.eos_id)
    yield from tokenizer.pieces((token for (token,) in steps if token is not None), after=tokens)


def _print_pieces(pieces: Iterator[str]) -> str:
    """Print a text, indented, as it comes."""
    text, printed = "", 0
    for piece in pieces:
        text += piece
        indented = indent(text)  # which grows at its end, as the text does
        print(indented[printed:], end="", flush=True)
        printed = len(indented)
    print()
    return text


def _sampling(settings: DictConfig) -> Sampling:
    with argument_path("generate"):
        return Sampling(settings.temperature, settings.top_k, settings.top_p)


def _prompts(settings: DictConfig) -> list[str]:
    if settings.prompt_file is None:
        given = "" if settings.prompt is None else settings.prompt
        return [_text(prompt) for prompt in (given if isinstance(given, ListConfig) else [given])]
    if settings.prompt is not None:
        raise ValueError("generate.prompt and generate.prompt_file are both given; leave one of them out.")
    path = Path(settings.prompt_file)
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"generate.prompt_file={path} cannot be read ({error}); a file of UTF-8 text works, or generate.prompt=."
        ) from error


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError(f"generate.prompt={prompt} is no text; quotes make it one, 'generate.prompt=\"{prompt}\"'.")
