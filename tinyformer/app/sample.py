"""Text samples, from the `generate` group."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from tinyformer.app.config import check_value
from tinyformer.data import TextTokenizer
from tinyformer.generation import Sampling, generate
from tinyformer.nn import Transformer


def sample_text(settings: DictConfig, network: Transformer, tokenizer: TextTokenizer) -> str:
    """The prompt and what the model makes of it; without a prompt, a text from its beginning.

    Raises:
        ValueError: a setting is out of its range, or the prompt's file cannot be read.
    """
    prompt, sampling = _prompt(settings), _sampling(settings)
    tokens = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(prompt)]])
    new = generate(network, tokens, settings.num_tokens, sampling, settings.seed)[0].tolist()
    if tokenizer.eos_id in new:
        new = new[: new.index(tokenizer.eos_id)]  # what follows is another document
    return prompt + tokenizer.decode(new)


def check_generation(settings: DictConfig) -> None:
    """Refuse bad settings now, and not when the model is trained.

    Raises:
        ValueError: see `sample_text`.
    """
    for function, names in ((Sampling, ("temperature", "top_k", "top_p")), (generate, ("num_tokens", "seed"))):
        for name in names:
            check_value(function, name, settings[name], f"generate.{name}")
    _prompt(settings)
    _sampling(settings)
    if settings.num_tokens < 0:
        raise ValueError(f"generate.num_tokens={settings.num_tokens} is negative; generate.num_tokens=200 works.")


def _sampling(settings: DictConfig) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p)


def _prompt(settings: DictConfig) -> str:
    if settings.prompt_file is None:
        return settings.prompt or ""
    if settings.prompt is not None:
        raise ValueError("generate.prompt and generate.prompt_file are both given; leave one of them out.")
    path = Path(settings.prompt_file)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"generate.prompt_file={path} cannot be read ({error}); a file of UTF-8 text works, or generate.prompt=."
        ) from error
