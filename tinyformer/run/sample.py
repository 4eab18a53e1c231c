"""The texts that a model generates at the end of a run, from the `generate` group."""

import itertools
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from tinyformer.config.errors import indent
from tinyformer.data import DataModule, TextTokenizer
from tinyformer.generation.generation import ends, stream
from tinyformer.nn import EncoderDecoder, Network, Transformer
from tinyformer.run.settings import Generation
from tinyformer.tasks import Seq2Seq, Task
from tinyformer.tasks.user_texts import TextReader

NUM_OUTPUTS = 3  # number of printed outputs of a split


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
    """Print what a model generates; see `print_outputs` and `print_samples`."""
    if isinstance(task, Seq2Seq):
        assert isinstance(network, EncoderDecoder)
        return print_outputs(generation, task, network, data.tokenizer)
    assert isinstance(network, Transformer)
    return print_samples(generation, network, data.tokenizer)


def print_outputs(
    generation: Generation, task: Seq2Seq, network: EncoderDecoder, tokenizer: TextTokenizer
) -> str | list[str] | None:
    """Print the output for each prompt; without prompts, a few sources of the split with references and outputs."""
    if not generation.has_prompt:
        shown = task.outputs[:NUM_OUTPUTS]
        for number, output in enumerate(shown, start=1):
            print(f"\nOutput {number} of {len(task.outputs):,}:")
            for name, text in vars(output).items():
                print(indent(f"{name:<10} {text}"))
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


def _print_pieces(pieces: Iterator[str]) -> str:
    if Console().is_jupyter:  # which shows each piece as a separate output
        pieces = iter(["".join(pieces)])
    text, printed = "", 0
    for piece in pieces:
        text += piece
        indented = indent(text)  # starts with what is printed already
        print(indented[printed:], end="", flush=True)
        printed = len(indented)
    print()
    return text
