"""Next-token prediction."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.batch import IGNORED, Batch
from tinyformer.data import TextTokenizer, TokenSplit
from tinyformer.errors import require_numbers
from tinyformer.generation.sampling import Sampling, ends, generate, require_amount
from tinyformer.nn import AttentionMask, Transformer
from tinyformer.tasks.task import TokenTask, describe_accuracy, perplexity
from tinyformer.tasks.user_texts import TextReader, Texts, texts_of

MAX_LOST_BYTES = 0.001  # the largest share of the bytes that a tokenizer loses of a text with bits per byte


class CausalLM(TokenTask):
    """Causal language modelling: each token is predicted from the tokens before it (Radford et al. 2018)."""

    generates = True

    def mask(self, batch: Batch) -> AttentionMask:
        """A causal mask, within documents if the batch has them; it also hides padding, which is on the right."""
        documents, starts = batch.get("documents"), batch.get("document_starts")
        return AttentionMask(causal=True, documents=documents, document_starts=starts)

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts, with the tokens after the first one as targets; the end of the text is not a target."""
        batch = self.read(reader, texts)
        inputs = batch["inputs"]
        is_target = torch.arange(inputs.shape[1], device=inputs.device) < batch["lengths"].unsqueeze(1) - 1
        return {**batch, "targets": inputs.roll(-1, dims=1).where(is_target, IGNORED)}

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"]:
        """The last token of each text."""
        return batch["lengths"] - 1

    def generate(
        self,
        reader: TextReader,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        num_return_sequences: int = 1,
        stop: str | Sequence[str] | None = None,
    ) -> list[list[int]]:
        """Each prompt with its continuation, up to the end of its document or `num_tokens` tokens; see `Sampling`.

        Prompts have any length; the model sees the last `max_seq_len` tokens. Continuation `i` is sampled with the seed
        `seed + i`, independently of the others. Settings are defined as in `transformers`: each prompt has
        `num_return_sequences` continuations in succession, and a text ends with the token that completes one of the
        strings in `stop`.
        """
        network, tokenizer = cast(Transformer, reader.network), reader.own_tokenizer
        works = {"num_tokens": 200, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 0}
        works |= {"repetition_penalty": 1.2, "num_return_sequences": 3}
        require_numbers(int, works, num_tokens=num_tokens, seed=seed, num_return_sequences=num_return_sequences)
        require_numbers(int, works, **({} if top_k is None else {"top_k": top_k}))
        require_numbers(float, works, temperature=temperature, repetition_penalty=repetition_penalty)
        require_numbers(float, works, **({} if top_p is None else {"top_p": top_p}))
        stops = [] if stop is None else texts_of("stop", stop)
        require_amount(num_tokens, seed, num_return_sequences, stops)
        rows = [prompt for prompt in prompts for _ in range(num_return_sequences)]
        missing = tokenizer.missing_ids(network.vocab_size) if tokenizer else []
        sampling = Sampling(temperature, top_k, top_p, missing, repetition_penalty)
        end = ends(reader.tokenizer, stops) if tokenizer or stops else {}
        new = generate(network, rows, num_tokens, sampling, seed, **end)
        return [[*row, *ids] for row, ids in zip(rows, new, strict=True)]

    def metrics(self, sums: Mapping[str, Tensor], split: TokenSplit) -> dict[str, float | None]:
        """The metrics of `TokenTask`, `perplexity` and `bits_per_byte`.

        Bits per byte of the raw UTF-8 text are comparable between tokenizers. They are None if tokens are unknown or
        not scored, or more than 0.1 % of the bytes are lost (see `tinyformer.data.lost_bytes`): their cost is unknown.
        """
        metrics = super().metrics(sums, split)
        # Scaled to the whole split, in case `limit_val_batches` scored only a part of it.
        bits = float(sums["nats"]) / float(sums["tokens"]) * split.num_tokens / math.log(2)
        cost_is_known = split.num_unknown == 0 and split.scored is None and split.lost_bytes <= MAX_LOST_BYTES
        return metrics | {
            "perplexity": perplexity(metrics["loss"]),
            "bits_per_byte": bits / split.num_bytes if cost_is_known else None,
        }

    def describe(self, metrics: Mapping[str, float | None], split: TokenSplit) -> dict[str, str | None]:
        bits = metrics["bits_per_byte"]
        reason = f"decode(encode(text)) differs from the text in {split.lost_bytes:.2%} of the bytes"
        reason = reason if split.scored is None else "not every token is scored"
        reason = "the text has unknown tokens" if split.num_unknown else reason
        return {
            "perplexity": f"{metrics['perplexity']:.2f}",
            "bits per byte": f"none: {reason}" if bits is None else f"{bits:.4f}",
            "next token": describe_accuracy(metrics),
        }
