"""The interface of a training objective, and two objectives: prediction of the next token and of masked tokens."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.data import TextTokenizer, TokenSplit
from tinyformer.data.batches.windows import IGNORED, Batch
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.generation.generation import Sampling, ends, generate, require_amount
from tinyformer.nn import AttentionMask, Network, Transformer
from tinyformer.tasks.user_texts import TextReader, Texts, texts_of

Table: TypeAlias = tuple[list[str], list[list[Any]]]  # columns and rows

MAX_SCORES = 2**26
"""Maximum number of logits to score at once: 256 MB in fp32. 32 x 1,024 tokens of GPT-2 have 25 times as many."""

MAX_LOST_BYTES = 0.001  # if the tokenizer loses a larger share of a text's bytes, bits per byte are not defined


class Task(ABC):
    """A training objective: the targets in a batch, the loss, and the metrics of predictions."""

    generates: bool = False  # whether the model can generate text, one token after the other
    monitor: str = "loss"  # the validation metric that selects the best weights
    higher_is_better: bool = False  # whether a larger value of that metric is better
    tests_best: bool = False  # whether a run ends by scoring the best weights on the test split, if it exists
    unit: str = "token"  # the item over which the loss is a mean, in the singular
    num_texts: int | None = 1  # number of texts in a row of a batch; None: one, or two for pairs
    network_class: type[Network] = Transformer  # the class of the networks to train
    needs_masking: bool = False  # whether the data have to mask tokens, see `tinyformer.data.Masking`
    has_loss: bool = True  # whether the model has a prediction head, and so predictions and a loss

    def mask(self, batch: Batch) -> AttentionMask:
        """The attention mask of a batch; by default it is bidirectional and hides padding.

        If there are documents, a token attends only to its own.
        """
        if "documents" in batch:  # padding is a separate document
            return AttentionMask(documents=batch["documents"], document_starts=batch.get("document_starts"))
        return AttentionMask(lengths=batch.get("lengths"))

    def forward(self, network: nn.Module, batch: Batch, **options: Any) -> Tensor:
        """The output of a network for a batch, such as logits; `options` are passed to the network's `forward`."""
        return network(batch["inputs"], self.mask(batch), **options)

    def require_loss(self, *_: Any, **__: Any) -> Any:
        """Raise an `ArgumentError` if the model has no prediction head, and so neither predictions nor a loss.

        `States` has this function in place of the methods that need a loss, and so it takes any arguments.
        """
        if not self.has_loss:
            reason = "the encoder has no prediction head, so there are no predictions and no loss"
            raise ArgumentError("task", type(self).__name__, f"{reason}; Model.encode returns its states")

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """The mean loss of a batch over its targets, in nats, for the backward pass; 0 if it has no target."""

    def num_targets(self, batch: Batch) -> Int[Tensor, " batch"]:
        """The number of targets of each row, by which `loss` is weighted in the mean of several batches.

        By default, all tokens in `targets` that are not `IGNORED` are targets; without `targets`, each row has one.
        """
        if "targets" not in batch:
            return torch.ones_like(batch["inputs"][:, 0])
        return (batch["targets"] != IGNORED).sum(dim=1)

    @abstractmethod
    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each row, and the number of targets that it sums over."""

    def tokenize(self, reader: TextReader, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """The token ids of texts for a network, padded on the right, and the number of tokens of each text."""
        # A tensor of token ids needs no padding, so that the value of the padding does not matter.
        padding = reader.own_tokenizer.eos_id if reader.own_tokenizer else 0
        return reader.padded(reader.rows_of(texts, self.num_texts), padding)

    def read(self, reader: TextReader, texts: Texts) -> Batch:
        """A batch of a user's texts, without targets; a task whose rows have two texts takes pairs of texts."""
        inputs, lengths = self.tokenize(reader, texts)
        return {"inputs": inputs, "lengths": lengths}

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """A batch of a user's texts, with targets or labels; see `read`."""
        return self.read(reader, texts)

    def nats_of_texts(self, reader: TextReader, batch: Batch) -> tuple[Float[Tensor, " texts"], Int[Tensor, " texts"]]:
        """The negative log-likelihood of each text of `read_scored`, and the number of targets that it sums over."""
        return self.nats(reader.network, batch)

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"] | None:
        """For each text, the index of the logits that predict a token; None if the logits are for the whole text."""
        raise ArgumentError("task", type(self).__name__, "does not predict a token after a text; CausalLM does")

    def prompts(self, reader: TextReader, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts, for `generate`."""
        return reader.tokenizer.read(texts) if texts else []

    def generate(self, reader: TextReader, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The token ids that a model generates for each prompt; subclasses add arguments, such as a temperature."""
        raise NotImplementedError

    def predict(self, network: Network, batches: Iterable[Batch], split: Any) -> Table:
        """The predictions of a network in evaluation mode for the rows of a split, in order."""
        raise ArgumentError("predict", True, f"{type(self).__name__} makes no predictions for rows", {"predict": False})

    @abstractmethod
    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The scores of a batch by name, which are sums, so that they can be added over batches."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """The metrics of a split, from its scores summed over batches: `loss`, `accuracy` and others.

        A metric that is not defined for the split is None.
        """

    def final_metrics(self, network: Network, split: Any, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """Further metrics of a split, which are computed only at the end of a run, since they are expensive."""
        return {}

    @abstractmethod
    def describe(self, metrics: Mapping[str, float | None], split: Any) -> dict[str, str | None]:
        """The metrics of a split as lines of the summary, by heading."""


class TokenTask(Task):
    """Prediction of tokens; `loss` is a mean over tokens."""

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        return self.forward(network, batch, targets=batch["targets"])

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch seq vocab_size"]:
        return self.forward(network, batch)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        logits = self.logits(network, batch).float()
        nats = F.cross_entropy(logits.mT, batch["targets"], ignore_index=IGNORED, reduction="none")
        return nats.sum(dim=1), self.num_targets(batch)

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the targets of a batch: `nats`, the negative log-likelihood, and three numbers of targets.

        `tokens` counts all targets; `top1` and `top5` count the targets among the one or five most likely tokens.
        """
        logits, targets = self.logits(network, batch).flatten(0, 1), batch["targets"].flatten()
        rows = max(1, MAX_SCORES // logits.shape[-1])
        parts = [_score(*part) for part in zip(logits.split(rows), targets.split(rows), strict=True)]
        return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """`loss` (nats per token), `accuracy` and `accuracy_top5`."""
        tokens = float(sums["tokens"])
        names = {"loss": "nats", "accuracy": "top1", "accuracy_top5": "top5"}
        return {name: float(sums[summed]) / tokens for name, summed in names.items()}


def _score(
    logits: Float[Tensor, "targets vocab_size"], targets: Int[Tensor, " targets"]
) -> dict[str, Float[Tensor, ""]]:
    logits, scored = logits.float(), targets != IGNORED
    likeliest = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    hits = (likeliest == targets.unsqueeze(-1)) & scored.unsqueeze(-1)
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    sums = {"nats": nats, "tokens": scored.sum(), "top1": hits[:, 0].sum(), "top5": hits.sum()}
    return {name: value.to(torch.float32) for name, value in sums.items()}


def describe_accuracy(metrics: Mapping[str, float | None]) -> str:
    """The accuracy of predicted tokens, for the summary."""
    return f"{metrics['accuracy']:.1%} correct, {metrics['accuracy_top5']:.1%} in the top five"


def require_smoothing(label_smoothing: float) -> None:
    """Refuse a share of smoothed labels that is negative or not below 1."""
    if not 0 <= label_smoothing < 1:
        reason = "must be at least 0 and below 1"
        raise ArgumentError("label_smoothing", label_smoothing, reason, {"label_smoothing": 0.1})


def perplexity(loss: float | None) -> float:
    """exp(loss), for a mean negative log-likelihood in nats; finite however large the loss."""
    assert loss is not None
    return math.exp(min(loss, 700.0))


class CausalLM(TokenTask):
    """Causal language modelling: each token is predicted from the tokens before it (Radford et al. 2018)."""

    generates = True

    def mask(self, batch: Batch) -> AttentionMask:
        """A causal mask, which hides padding on the right; if there are documents, a token attends only to its own."""
        documents, starts = batch.get("documents"), batch.get("document_starts")
        return AttentionMask(causal=True, documents=documents, document_starts=starts)

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts, with each token as the target of the token before it; the last token has no target."""
        batch = self.read(reader, texts)
        inputs = batch["inputs"]
        is_target = torch.arange(inputs.shape[1], device=inputs.device) < batch["lengths"].unsqueeze(1) - 1
        return {**batch, "targets": inputs.roll(-1, dims=1).where(is_target, IGNORED)}

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"]:
        """The index of the last token of each text."""
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
        `seed + i`, whatever the other prompts are. Settings are defined as in `transformers`: each prompt has
        `num_return_sequences` continuations in succession, and a text ends with the token that completes one of the
        strings in `stop`.
        """
        network, tokenizer = cast(Transformer, reader.network), reader.own_tokenizer
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

        Bits per byte of the raw UTF-8 text are comparable between tokenizers. They are None if some tokens are unknown
        or not scored, or if more than 0.1 % of the bytes are lost, see `tinyformer.data.lost_bytes`.
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


class MaskedLM(TokenTask):
    """Masked tokens are predicted from all other tokens (Devlin et al. 2018, arXiv 1810.04805).

    The data module masks the tokens, see `tinyformer.data.Masking`.

    Args:
        pseudo_perplexity_tokens: number of validation tokens, from the beginning of the split, over which
            pseudo-perplexity is computed at the end of a run, by one forward pass for each token; 0: none.
    """

    needs_masking = True

    def __init__(self, pseudo_perplexity_tokens: int = 512) -> None:
        require_at_least(0, {"pseudo_perplexity_tokens": 512}, pseudo_perplexity_tokens=pseudo_perplexity_tokens)
        self.pseudo_perplexity_tokens = pseudo_perplexity_tokens

    def metrics(self, sums: Mapping[str, Tensor], split: TokenSplit) -> dict[str, float | None]:
        """The metrics of `TokenTask`, `num_scored`, and the share of the most frequent token, `majority_share`."""
        counts = np.bincount(np.asarray(split.ids))
        counts[split.ids[0]] = 0  # <eos>, which is never masked
        majority_share = float(counts.max() / max(counts.sum(), 1))
        return super().metrics(sums, split) | {"num_scored": int(sums["tokens"]), "majority_share": majority_share}

    @torch.no_grad()
    def final_metrics(self, network: Network, split: TokenSplit, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """`pseudo_perplexity`: each token is masked once (Salazar et al. 2020, arXiv 1910.14659).

        It is exp of the mean of -log p(token | all other tokens of its window), a window being as long as the model's
        context. A token attends to its whole window, including other documents, even with `data.document_mask=true`.
        """
        ids = torch.from_numpy(np.asarray(split.ids[: self.pseudo_perplexity_tokens], dtype=np.int64))
        assert tokenizer.mask_id is not None
        device, was_training = next(network.parameters()).device, network.training
        network.eval()
        nats = []
        for window in ids.split(network.max_seq_len):
            masked = (window != tokenizer.start_id).nonzero()[:, 0]
            nats.append(pseudo_nats(network, window.to(device), masked, tokenizer.mask_id))
        network.train(was_training)
        total = torch.cat(nats)
        return {"pseudo_perplexity": perplexity(float(total.mean())) if len(total) else None}

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """A batch of texts, in which every token is a target, except special tokens."""
        batch, tokenizer = self.read(reader, texts), reader.own_tokenizer
        special = torch.tensor(sorted(tokenizer.special_ids if tokenizer else []), device=reader.device)
        return {**batch, "targets": batch["inputs"].masked_fill(torch.isin(batch["inputs"], special), IGNORED)}

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"]:
        """The index of the mask token in each text."""
        mask_ids = [tokenizer.mask_id] if tokenizer.mask_id is not None else []
        is_masked = torch.isin(batch["inputs"], batch["inputs"].new_tensor(mask_ids))
        if not bool((is_masked.sum(dim=1) == 1).all()):
            reason = f"must contain one {tokenizer.decode(mask_ids) or 'mask token'}, which the model predicts"
            raise ArgumentError("text", tokenizer.decode(batch["inputs"][0]), reason)
        return is_masked.int().argmax(dim=1)

    def nats_of_texts(self, reader: TextReader, batch: Batch) -> tuple[Float[Tensor, " texts"], Int[Tensor, " texts"]]:
        """The negative pseudo-log-likelihood of each text, and the number of its targets, each masked once."""
        mask_id = reader.tokenizer.mask_id
        assert mask_id is not None
        nats, places = [], [(row != IGNORED).nonzero()[:, 0] for row in batch["targets"]]
        for row, length, masked in zip(batch["inputs"], batch["lengths"].tolist(), places, strict=True):
            nats.append(pseudo_nats(reader.network, row[:length], masked, mask_id).sum())
        return torch.stack(nats), torch.tensor(list(map(len, places))).to(nats[0].device)

    def describe(self, metrics: Mapping[str, float | None], split: TokenSplit) -> dict[str, str | None]:
        pseudo = metrics.get("pseudo_perplexity")
        return {
            "masked token": f"{describe_accuracy(metrics)}; the most frequent token makes up "
            f"{metrics['majority_share']:.1%}",
            "pseudo-perplexity": None if pseudo is None else f"{pseudo:.2f}, over the first tokens of the split",
        }


@torch.no_grad()
def pseudo_nats(
    network: Network, window: Int[Tensor, " seq"], positions: Int[Tensor, " masked"], mask_id: int
) -> Float[Tensor, " masked"]:
    """-log p(token | all other tokens) of the tokens at some positions of a window, each masked in turn."""
    nats = [torch.zeros(0, device=window.device)]
    # 32 copies of the window at a time. `split` of an empty tensor would give one empty part.
    for masked in positions.to(window.device).split(32) if len(positions) else ():
        rows = torch.arange(len(masked), device=window.device)
        tokens = window.repeat(len(masked), 1)
        tokens[rows, masked] = mask_id
        logits = network(tokens, AttentionMask())[rows, masked].float()
        nats.append(F.cross_entropy(logits, window[masked], reduction="none"))
    return torch.cat(nats)


class States(Task):
    """The final states of an encoder without a prediction head, such as a sentence encoder's.

    The output for each token is its final state. There are no predictions and no loss, so that nothing can be trained;
    every method that needs a loss raises an `ArgumentError`.
    """

    has_loss = False

    loss = nats = places = score = metrics = describe = Task.require_loss
