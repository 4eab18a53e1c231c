"""A trained model in Python: it scores, answers and generates texts, and shows what its heads do."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis import Analysis, AnalysisContext
from tinyformer.analysis.context import changed
from tinyformer.checkpoint.file import SNAPSHOTS, Checkpoint
from tinyformer.data import TextTokenizer
from tinyformer.data.batches.windows import Batch
from tinyformer.errors import ArgumentError
from tinyformer.measures.points import (
    ForwardPass,
    Points,
    Replacement,
    forward_pass,
    intervention,
    lengths_of,
    points_of,
    without_padding,
)
from tinyformer.model.ablation import Head, ablated_heads
from tinyformer.model.text_maps import TextMaps, maps_of_batch
from tinyformer.nn import BaseAttention, LatentAttention, Network, RelativePosition
from tinyformer.report import AnalysisResult
from tinyformer.run.evaluation import analyse, make_context
from tinyformer.run.pipeline import evaluation_in_python
from tinyformer.run.run import Run
from tinyformer.tasks import CausalLM, Prediction, SpanExtraction, Task
from tinyformer.tasks.span import require_one_window
from tinyformer.tasks.user_texts import SOME_TEXTS, TextReader, Texts, is_row, require_token_ids, texts_of


class Origin(NamedTuple):
    """The origin of a model's weights: the checkpoint as it was read, and the other classes that it may use."""

    checkpoint: Checkpoint
    trusted: Sequence[str] = ()

    def __repr__(self) -> str:
        """The file within the folder of its run, and the step: "run/last.ckpt, step 144"."""
        *folders, name = self.checkpoint.path.parts
        run = [folder for folder in folders if folder not in ("checkpoints", SNAPSHOTS)][-1:]
        return f"{'/'.join([*run, name])}, step {self.checkpoint.step:,}"


class Model:
    """A trained network with its tokenizer and task; made by `load`.

    Methods take texts, in the form in which the task reads them:

    | task | `run`, `logits`, `attention`, `ablated` | `loss` |
    |---|---|---|
    | language modelling | `texts` | `texts` |
    | classification | `texts`, or a list of pairs of texts | `texts, labels` |
    | sequence to sequence | `texts, targets`: sources, and by default what the model decodes | `texts, targets` |
    | span extraction | `texts, contexts`: questions, and the context of each or of all | `texts, contexts, answers` |

    `texts` is one text, a list of texts, or a tensor of token ids of shape (batch, seq). Texts are padded on the right,
    which does not affect the results: outputs for padding are zero. A text is read between the special tokens that its
    tokenizer adds: for an imported model those of `transformers`, for others, as in training, the token that starts a
    document. Special tokens can be spelled out in a text, such as `<mask>`; token ids are used as they are.

    Targets may be token ids, without those that begin and end a target. Each window of a long context is a row. A model
    without a tokenizer, such as Marian's, takes only token ids. `origin` is the checkpoint of the weights.

    Methods raise an `ArgumentError` if there is no text, one is too long, or a token id is unknown.
    """

    def __init__(
        self, network: Network, tokenizer: TextTokenizer | None, task: Task, origin: Origin | None = None
    ) -> None:
        self.network, self.task, self.origin, self._tokenizer = network.eval(), task, origin, tokenizer

    def __repr__(self) -> str:
        return describe(type(self).__name__, self.network, self.task, self.origin)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer; an `ArgumentError` if it has none."""
        return self._reader.tokenizer

    @property
    def _reader(self) -> TextReader:
        return TextReader(self.network, self._tokenizer)

    @property
    def max_seq_len(self) -> int:
        """The maximum length of a text in tokens, including the special tokens around it."""
        return self.network.max_seq_len

    @property
    def points(self) -> Points:
        """The points that `run` captures and replaces, with their shapes.

        - `layers.0.attention.queries`, `.keys`, `.values`: after normalisation and rotary positions, if any;
          `.scores`, `.weights`: before and after the softmax, without dropout; `.output_by_head`: the input of the
          output projection; `.added_by_head`: the part of each head in `.output`, the output of the layer.
        - `layers.0.feed_forward.input`, `.output`, and `.neurons`, the input of its last projection.
        - `layers.0.residual_mid`: the residual stream after attention, in a post-norm block normalised, as the next
          sublayer reads it; `residual_cross_mid`: after cross-attention; `residual_post`: the output of the layer.
        - `token_embedding`, `position_embedding`: what each adds to the stream; `embedding`, the input of the first
          layer; `final_norm`, the output of the last; `logits`.
        """
        return Points({name: point.shape for name, point in points_of(self.network).items()})

    def tokenize(self, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """The token ids that the encoder reads, padded on the right, and the length of each text in tokens."""
        return self.task.tokenize(self._reader, texts)

    @torch.no_grad()
    def encode(self, texts: Texts) -> Float[Tensor, "batch seq d_model"]:
        """The encoder's output for each token."""
        tokens, lengths = self.tokenize(texts)
        mask = self.task.mask({"inputs": tokens, "lengths": lengths, "source_lengths": lengths})
        return without_padding(self.network.encoder(tokens, mask), lengths)

    @torch.no_grad()
    def logits(self, texts: Texts, *others: Any, **named: Any) -> Float[Tensor, "batch *seq scores"]:
        """The logits: of shape (batch, seq, vocab_size), or (batch, num_classes) from a classifier."""
        batch = self._batch(texts, *others, **named)
        logits = self.task.forward(self.network, batch)
        return without_padding(logits, lengths_of(batch)["seq"]) if logits.ndim == 3 else logits

    @overload
    def attention(self, texts: str, *others: Any, **named: Any) -> TextMaps: ...

    @overload
    def attention(
        self, texts: Sequence[str | tuple[str, str]] | Tensor, *others: Any, **named: Any
    ) -> list[TextMaps]: ...

    def attention(self, texts: Texts, *others: Any, **named: Any) -> TextMaps | list[TextMaps]:
        """The exact attention maps of a text: `maps[layer, head]`, queries × keys; see `TextMaps`.

        An encoder–decoder has them for a source and its target: `maps["cross", layer, head]`. For several texts, or
        for token ids, the result is a list with the maps of each, without padding. A context must fit into one window.
        """
        batch = self._batch(texts, *others, **named)
        require_one_window(batch)
        maps = maps_of_batch(self.network, self.task, self._tokenizer, batch, str(self.origin or ""))
        parts = ([part] if isinstance(part, str) else part for part in (texts, *others, *named.values()))
        rows = zip(*(part for part in parts if isinstance(part, list | tuple) and len(part) == len(maps)), strict=True)
        read = [[text for text in (*row, row) if is_row(text, None)] for row in rows]  # one by one, or as a pair
        maps = [replace(of, texts=texts) for of, texts in zip(maps, read, strict=True)] if read else maps
        return maps[0] if isinstance(texts, str) else maps

    def run(
        self,
        texts: Texts,
        *others: Any,
        capture: str | Sequence[str] = (),
        replace: Mapping[str, Replacement] | None = None,
        gradients: bool = False,
        **named: Any,
    ) -> ForwardPass:
        """A forward pass that returns activations, or replaces them and recomputes everything downstream.

            logits, activations = model.run("The cat", capture=["layers.*.residual_post"])
            model.run("The cat", replace={"layers.0.attention.values": torch.zeros_like})

        It is exact for every attention backend and for a compiled network, which runs uncompiled. Activations are zero
        at padding. Where attention weights are replaced, the layer's output is computed from them by definition.

        Args:
            texts: the texts.
            others: what else the task reads, as in the table above.
            capture: names of `points`, with `*` for any characters.
            replace: for points, named in the same way, a tensor of the activation's shape, dtype and device, or a
                function of the activation that returns one. Functions may change their argument in place.
            gradients: if True, the logits are computed from the captured tensors themselves, so that
                `torch.autograd.grad(logits[0, -1, 5], activations[point])` is the gradient at a point. They always are
                where a tensor in `replace` requires a gradient.
            named: the same as `others`, by name.
        """
        batch = self._batch(texts, *others, **named)
        forward = partial(self.task.forward, self.network, batch)
        return forward_pass(self.network, forward, lengths_of(batch), capture, replace, gradients)

    def ablated(
        self, heads: Sequence[Head], mode: str = "zero", texts: Texts | None = None, *others: Any, **named: Any
    ) -> AbstractContextManager[None]:
        """Ablate heads in all that the model computes inside the block.

            with model.ablated([(0, 1), (2, 3)], mode="mean", texts=texts):
                print(model.loss(texts), model.generate("The cat"))

        In nested blocks, the heads of both are ablated; where both name a head, the inner block decides.

        Args:
            heads: (layer, head) pairs, or ("cross", layer, head) with a kind of `encoder`, `decoder` or `cross`; heads
                keep their numbers when others are pruned.
            mode: what replaces the output of a head at every token: `zero`; its `mean` over the tokens of the texts
                (Wang et al. 2022, arXiv 2211.00593); or `resample`, its output at the same position of another text
                (Chan et al. 2022, causal scrubbing): one of the texts, drawn at random with a fixed seed, and beyond
                its end a random token of it. `HeadAblation` has the same modes.
            texts: the texts that the replacement is taken from, without padding; not needed for `zero`.
            others: what else the task reads, as in the table above.
            named: the same, by name.
        """
        batches = [] if texts is None else [self._batch(texts, *others, **named)]
        context = AnalysisContext(self.network, batches, self.task, cast(TextTokenizer, self._tokenizer))
        return ablated_heads(context, heads, mode)

    @torch.no_grad()
    def loss(self, texts: Texts, *others: Any, **named: Any) -> Float[Tensor, " batch"]:
        """The loss of each text in nats per target.

        Targets are the tokens after the first one; with a masked language model, each token but the special ones is
        masked in turn, so that exp(loss) is the pseudo-perplexity (Salazar et al. 2020, arXiv 1910.14659). A classifier
        has one target, the label: a name, or its index (where all names are integers, a number is a name, too). An
        encoder–decoder has the tokens of the target and the one that ends it. A model for questions has the first and
        the last token of the answer, whose loss is the mean over both, and over the windows of its context; the answer
        is empty if there is none.
        """
        batch = self.task.read_scored(self._reader, texts, *others, **named)
        nats, targets = self.task.nats_of_texts(self._reader, batch)
        for index in (targets == 0).nonzero().flatten().tolist():
            reason = "must be more tokens: the first one has no loss, nor has a special one where tokens are masked"
            raise ArgumentError(f"len(texts[{index}])", int(batch["lengths"][index]), reason, {"texts": SOME_TEXTS})
        return nats / targets

    def generate(
        self,
        prompts: str | Sequence[str],
        *others: Any,
        capture: str | Sequence[str] = (),
        replace: Mapping[str, Replacement] | None = None,
        **settings: Any,
    ) -> "Generated":
        """Continue each prompt up to the end of its document; an encoder–decoder gives the target of each source.

        The settings, see `tinyformer.tasks.CausalLM.generate`, are `num_tokens`, `temperature`, `top_k`, `top_p`,
        `seed`, `repetition_penalty`, `num_return_sequences` and `stop`; for an encoder–decoder `beams`,
        `length_penalty` and `length_offset`, see `Beam`, and `max_tokens`.

        `capture` and `replace` are those of `run`, for each pass of the network: over a prompt, and then, with the
        cache, over each new token, with the keys and values of all tokens so far, or of the window of local attention.
        Prompts are then read one at a time; a pass has a row for each continuation of a prompt.
        """
        texts, is_causal = texts_of("prompts", prompts), isinstance(self.task, CausalLM)
        rows, number = self.task.prompts(self._reader, texts), settings.get("num_return_sequences", 1)
        generated, ids = Generated(), [] if capture or replace else self._generated(rows, *others, **settings)
        # Keys and values are captured even where it costs less to read the latents that they are made from.
        with changed([of for of in self.network.attentions() if isinstance(of, LatentAttention)], reads_latents=False):
            for index, row in enumerate(rows if capture or replace else ()):
                own = settings | ({"seed": settings.get("seed", 0) + index * number} if is_causal and index else {})
                with intervention(self.network, {}, capture, replace) as passes:
                    ids += self._generated([row], *others, **own)
                generated.activations = [*generated.activations, passes]
        for at, row in enumerate(ids):
            prompt = rows[of := at * len(rows) // len(ids)]
            new = self.tokenizer.continuation(row[len(prompt) :], after=prompt) if is_causal else ""
            generated.append(texts[of] + new if is_causal else self.tokenizer.decode(row))
        return generated

    def generate_ids(
        self, ids: Int[Tensor, "batch seq"], lengths: Tensor | list[int] | None = None, *others: Any, **settings: Any
    ) -> list[list[int]]:
        """The token ids that `generate` gives: each prompt with its continuation, or the target of each source.

            (ids,) = model.generate_ids(*model.tokenize("The cat"), num_tokens=20)
            (maps,) = model.attention(torch.tensor([ids]))  # the text may be read as other tokens

        A source has the tokens that begin and end it, a target has none. Token ids are padded on the right; `lengths`
        do not count padding, of which there is none by default. For the settings see `generate`.
        """
        require_token_ids("ids", ids, self.network.vocab_size)
        lengths = torch.as_tensor([ids.shape[1]] * len(ids) if lengths is None else lengths)
        if lengths.shape != ids.shape[:1] or not bool(((lengths > 0) & (lengths <= ids.shape[1])).all()):
            reason = f"must hold {len(ids)} lengths from 1 to {ids.shape[1]}"
            raise ArgumentError("lengths", lengths.tolist(), reason)
        rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        return self._generated(rows, *others, **settings)

    def _generated(self, rows: list[list[int]], *others: Any, **settings: Any) -> list[list[int]]:
        if not self.task.generates:
            raise ArgumentError("task", type(self.task).__name__, "cannot generate text; CausalLM can")
        return self.task.generate(self._reader, rows, *others, **settings)

    def answer(
        self, questions: str | Sequence[str], contexts: str | Sequence[str], stride: int | None = None
    ) -> list[Prediction]:
        """The answer to each question; its text is empty where the model predicts that the context has none.

        Args:
            questions: the questions; long ones are truncated, as in the model's run.
            contexts: the context of each question, of any length, or one context for all questions.
            stride: see `tinyformer.data.QuestionTexts.cut`; None for that of the model's run.
        """
        if not isinstance(self.task, SpanExtraction):
            raise ArgumentError("task", type(self.task).__name__, "answers no questions; SpanExtraction does")
        asked = self.task.ask(self._reader, questions, contexts, None, stride, "questions")
        return self.task.answer(self.network, asked)

    def analyse(
        self, analysis: str | Analysis = "heads", overrides: Sequence[str] = (), folder: str | Path | None = None
    ) -> AnalysisResult:
        """The results of `tinyformer evaluate analysis=…` on the data of the model's run: tables and figures, by name.

            findings = model.analyse("heads", ["analysis.mode=mean"])
            columns, rows = findings.tables["ablation"]
            findings.figures["ablation"]

        The model is analysed as it is, also inside `ablated`. Its checkpoint is not read again, except with `step=`,
        which reads the snapshots of its run.

        Args:
            analysis: a name of the axis `analysis`, or an analysis, such as `HeadAblation(mode="mean")`.
            overrides: further words of the command line, such as "split=test", "data.files=book.txt" or "step=all".
            folder: where to write what the command line writes; by default, nothing is kept.

        Raises:
            ConfigError: something in the overrides cannot work, or the analysis does not fit the model.
        """
        words = [f"analysis={analysis}"] if isinstance(analysis, str) else []
        with self._evaluation([*words, *overrides], folder) as run:
            run.analysis = run.analysis if isinstance(analysis, str) else analysis
            findings = analyse(run)
        findings.files = findings.files if folder else []
        return findings

    def sample(self, num_windows: int, overrides: Sequence[str] = ()) -> AnalysisContext:
        """The model with a random sample of the validation data of its run, for analyses: `HeadAblation()(model)`.

        It has at most `num_windows` windows, examples or pairs; see `analyse` for the overrides.
        """
        with self._evaluation(overrides) as run:
            return make_context(run, num_windows)

    def _evaluation(self, overrides: Sequence[str], folder: str | Path | None = None) -> AbstractContextManager[Run]:
        if self.origin is None:
            raise ArgumentError("origin", None, "the model was not loaded from a checkpoint, whose data are analysed")
        checkpoint, trusted = self.origin
        return evaluation_in_python(checkpoint, self.network, overrides, folder, trusted)

    def _batch(self, texts: Texts, *others: Any, **named: Any) -> Batch:
        return self.task.read(self._reader, texts, *others, **named)


class Generated(list[str]):
    """Generated texts; `activations` holds, for each prompt, those of each pass of the network by point."""

    activations: Sequence[dict[str, list[Tensor]]] = ()


def describe(name: str, network: Network, task: Task, origin: Origin | None) -> str:
    """The task, the sizes, the attention and the parameters of a model, and its checkpoint, if it has one."""
    layers = [f"{len(stack.layers)} of width {stack.token_embedding.embedding_dim}" for stack in network.stacks()]
    if len(layers) > 1:
        layers = [f"encoder {layers[0]}", f"decoder {layers[1]}"]
    kinds: dict[str, None] = {}
    for layer, (*kind, _) in zip(network.attentions(), network.layer_addresses(), strict=True):
        kinds.setdefault(" ".join([*map(str, kind), _attention(layer)]))
    pruned = len(network.pruned_heads())
    positions = {type(stack.position).__name__: None for stack in network.stacks() if stack.position}
    lines = {
        "task": type(task).__name__,
        "layers": ", ".join(layers),
        "attention": "; ".join(kinds),
        "position": ", ".join(positions),
        "pruned": f"{pruned} heads" if pruned else "",
        "vocabulary": f"{network.vocab_size:,} tokens",
        "context": f"{network.max_seq_len:,} tokens",
        "parameters": f"{network.num_parameters():,}",
        "checkpoint": str(origin or ""),
    }
    width = max(map(len, lines))
    return "\n".join([name, *(f"  {name:{width}}  {text}" for name, text in lines.items() if text)])


def _attention(layer: BaseAttention) -> str:
    heads = layer.num_heads + len(layer.head_map.pruned)
    shared = f" on {layer.num_kv_heads} key/value heads" if layer.num_kv_heads < layer.num_heads else ""
    window = f", window {layer.window}" if layer.window else ""
    position = f", {type(layer.position).__name__}" if type(layer.position) is not RelativePosition else ""
    return f"{type(layer).__name__}, {heads} heads{shared}{window}{position}"
