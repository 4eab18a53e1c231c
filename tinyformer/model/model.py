"""A trained model in Python: it scores and generates texts, answers questions, and returns its attention maps."""

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
    """The origin of a model's weights: its loaded checkpoint, and the user-defined classes that it may use."""

    checkpoint: Checkpoint
    trusted: Sequence[str] = ()

    def __repr__(self) -> str:
        """The folder of the run, the name of the file, and the step: "run/last.ckpt, step 144"."""
        *folders, name = self.checkpoint.path.parts
        run = [folder for folder in folders if folder not in ("checkpoints", SNAPSHOTS)][-1:]
        return f"{'/'.join([*run, name])}, step {self.checkpoint.step:,}"


class Model:
    """A trained network with its tokenizer and task; made by `load`.

    The task determines the arguments of the methods:

    | task | `run`, `logits`, `attention`, `ablated` | `loss` |
    |---|---|---|
    | language modelling | `texts` | `texts` |
    | classification | `texts`, or a list of pairs of texts | `texts, labels` |
    | sequence to sequence | `texts, targets`: sources and targets (by default, generated) | `texts, targets` |
    | states, without a head | `texts`; the point `logits` holds the final states | none |
    | span extraction | `texts, contexts`: questions, and one context for each or for all | `texts, contexts, answers` |

    `texts` is one text, a list of texts, or a tensor of token ids of shape (batch, seq). Texts are padded on the right,
    which does not affect the results: outputs for padding are zero. Texts get the special tokens of the tokenizer: in
    an imported model, the special tokens that `transformers` adds; otherwise, as in training, the token that starts a
    document. Special tokens can be spelled out in a text, such as `<mask>`; token ids are used unchanged.

    Targets may be token ids, without the tokens that begin and end a target. A long context is cut into windows, one
    per row. A model without a tokenizer (Marian's) takes only token ids. `origin` is the checkpoint of the weights.

    Methods raise an `ArgumentError` if there is no text, a text is too long, or a token id is unknown.
    """

    def __init__(
        self, network: Network, tokenizer: TextTokenizer | None, task: Task, origin: Origin | None = None
    ) -> None:
        self.network, self.task, self.origin, self._tokenizer = network.eval(), task, origin, tokenizer

    def __repr__(self) -> str:
        return describe(type(self).__name__, self.network, self.task, self.origin)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer; an `ArgumentError` is raised if the model has none."""
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

        - `layers.0.attention.queries`, `.keys`, `.values`: after normalisation and rotary positions, if the model uses
          them; `.scores` before the softmax, `.weights` after it, without dropout; `.output_by_head`: the input of
          the output projection; `.added_by_head`: the summand of each head in `.output`, the attention's output.
        - `layers.0.feed_forward.input`, `.output`, and `.neurons`, the input of its last projection.
        - `layers.0.attention.output_norm`, `layers.0.feed_forward.output_norm`: the normalised output, in some blocks.
        - `layers.0.residual_mid`: the stream after attention (in a post-norm block, after the norm; no sublayer of a
          parallel block reads it); `residual_cross_mid`: after cross-attention; `residual_post`: the layer's output.
        - `token_embedding`, `position_embedding`: two summands, whose sum, normalised if the model has an embedding
          norm, is `embedding`, the first layer's input; `final_norm`, the output of the last norm; `logits`
          (without a prediction head, the final states).
        """
        return Points({name: point.shape for name, point in points_of(self.network).items()})

    def tokenize(self, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """The token ids that the encoder receives, padded on the right, and the length of each text in tokens."""
        return self.task.tokenize(self._reader, texts)

    @torch.no_grad()
    def encode(self, texts: Texts) -> Float[Tensor, "batch seq d_model"]:
        """The encoder's output for each token."""
        tokens, lengths = self.tokenize(texts)
        mask = self.task.mask({"inputs": tokens, "lengths": lengths, "source_lengths": lengths})
        return without_padding(self.network.encoder(tokens, mask), lengths)

    @torch.no_grad()
    def logits(self, texts: Texts, *others: Any, **named: Any) -> Float[Tensor, "batch *seq scores"]:
        """The logits: (batch, seq, vocab_size), of classes (batch, num_classes), in span extraction (batch, seq, 2)."""
        self.task.require_loss()
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

        An encoder–decoder has maps of a source and its target, such as `maps["cross", layer, head]`. For several texts,
        or token ids, the result is a list with each text's maps, without padding. Contexts must fit into one window.
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

        The results are exact for every attention backend and for a compiled network, which runs uncompiled. Activations
        are zero at padding. If attention weights are replaced, the layer's output is computed from the new ones.

        Args:
            texts: one or several texts, or token ids, see `Model`.
            others: further arguments of the task, see the table in `Model`.
            capture: names of `points`, with `*` for any characters.
            replace: for names of `points`, also with `*`, a tensor with the shape, dtype and device of the activation,
                or a function from the activation to such a tensor. Functions may change their argument in place.
            gradients: if True, the logits are computed from the captured tensors themselves, so that
                `torch.autograd.grad(logits[0, -1, 5], activations[point])` is the gradient at a point. This is always
                the case if a tensor in `replace` requires a gradient.
            named: further arguments of the task, by name.
        """
        batch = self._batch(texts, *others, **named)
        forward = partial(self.task.forward, self.network, batch)
        return forward_pass(self.network, forward, lengths_of(batch), capture, replace, gradients)

    def ablated(
        self, heads: Sequence[Head], mode: str = "zero", texts: Texts | None = None, *others: Any, **named: Any
    ) -> AbstractContextManager[None]:
        """Ablate heads in everything that the model computes inside a `with` statement.

            with model.ablated([(0, 1), (2, 3)], mode="mean", texts=texts):
                print(model.loss(texts), model.generate("The cat"))

        Nested statements ablate the heads of both; if both name a head, the inner statement's replacement is used.

        Args:
            heads: (layer, head) pairs; in an encoder–decoder (kind, layer, head), where kind is "encoder", "decoder" or
                "cross". Pruning does not renumber heads.
            mode: the replacement of a head's output at every token: `zero`; its `mean` over the tokens of the texts
                (Wang et al. 2022, arXiv 2211.00593); or `resample`, its output at the same position of one of the texts
                (Chan et al. 2022, causal scrubbing). This text is drawn with a fixed seed; for positions beyond its
                end, the output at a random token of it is used. `HeadAblation` has the same modes.
            texts: the texts from whose outputs replacements are computed, padding excluded; not needed for `zero`.
            others: further arguments of the task, see the table in `Model`.
            named: further arguments of the task, by name.
        """
        batches = [] if texts is None else [self._batch(texts, *others, **named)]
        context = AnalysisContext(self.network, batches, self.task, cast(TextTokenizer, self._tokenizer))
        return ablated_heads(context, heads, mode)

    @torch.no_grad()
    def loss(self, texts: Texts, *others: Any, **named: Any) -> Float[Tensor, " batch"]:
        """The loss of each text in nats per target.

        A language model's targets are all tokens but the first. A masked language model's targets, all tokens but
        special ones, are masked one after another: exp(loss) is the pseudo-perplexity (Salazar et al. 2020, arXiv
        1910.14659). A classifier's only target is the label, given by name or by index (if all names are integers, a
        number is a name). An encoder–decoder's targets are the tokens of the target and its end token. For span
        extraction, the targets are the first and the last token of the answer, and the loss is the mean over both and
        over the windows of the context; an empty answer says that the context has no answer.
        """
        batch = self.task.read_scored(self._reader, texts, *others, **named)
        nats, targets = self.task.nats_of_texts(self._reader, batch)
        for index in (targets == 0).nonzero().flatten().tolist():
            reason = "must be more tokens: the first token has no loss, and a masked model's special tokens have none"
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
        """Continue each prompt up to the end of its document; an encoder–decoder generates the target of each source.

        The settings, see `tinyformer.tasks.CausalLM.generate`, are `num_tokens`, `temperature`, `top_k`, `top_p`,
        `seed`, `repetition_penalty`, `num_return_sequences` and `stop`; for an encoder–decoder `beams`,
        `length_penalty` and `length_offset`, see `Beam`, and `max_tokens`.

        `capture` and `replace` work as in `run`, in each forward pass: the first pass covers a prompt, and each further
        pass one new token, where the points of keys and values cover all tokens so far, or those in the window.
        Prompts then run one after another; a pass has a row for each continuation of a prompt.
        """
        texts, is_causal = texts_of("prompts", prompts), isinstance(self.task, CausalLM)
        rows, number = self.task.prompts(self._reader, texts), settings.get("num_return_sequences", 1)
        generated, ids = Generated(), [] if capture or replace else self._generated(rows, *others, **settings)
        # Attention to the latents costs less, but computes no keys and values, which are to be captured.
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
        """The token ids that `generate` decodes: each prompt with its continuation, or the target of each source.

            (ids,) = model.generate_ids(*model.tokenize("The cat"), num_tokens=20)
            (maps,) = model.attention(torch.tensor([ids]))  # tokenizing the text may give other tokens

        A source includes the tokens that begin and end it; a target excludes them. Token ids are padded on the right,
        and `lengths` gives the number of tokens in each row; None for no padding. For the settings see `generate`.
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
        """The answer to each question; its text is empty if the model predicts that the context has no answer.

        Args:
            questions: the questions; long ones are truncated, as in the model's run.
            contexts: the context of each question, of any length, or one context for all questions.
            stride: tokens between window starts, see `tinyformer.data.QuestionTexts.cut`; None for the run's value.
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

        The model is analysed as it is, also with heads ablated inside `ablated`. The checkpoint is not read again; only
        the override `step=` makes the analysis read snapshots of the run.

        Args:
            analysis: the name of a file in `conf/analysis`, or an analysis, such as `HeadAblation(mode="mean")`.
            overrides: further arguments of the command line, such as "split=test", "data.files=book.txt" or "step=all".
            folder: the folder for the files that the command line writes; by default, no files are kept.

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
        """The model with a random sample of the validation data of its run.

        The sample has at most `num_windows` windows, examples or pairs; see `analyse` for the overrides. An
        analysis that is called with a model, as in `HeadAblation()(model)`, draws the sample itself.
        """
        with self._evaluation(overrides) as run:
            return make_context(run, num_windows)

    def _evaluation(self, overrides: Sequence[str], folder: str | Path | None = None) -> AbstractContextManager[Run]:
        if self.origin is None:
            raise ArgumentError("origin", None, "the model has no checkpoint that names the data to analyse")
        checkpoint, trusted = self.origin
        return evaluation_in_python(checkpoint, self.network, overrides, folder, trusted)

    def _batch(self, texts: Texts, *others: Any, **named: Any) -> Batch:
        return self.task.read(self._reader, texts, *others, **named)


class Generated(list[str]):
    """Generated texts; `activations[i][point]` lists the activations of a point for prompt i, one per forward pass."""

    activations: Sequence[dict[str, list[Tensor]]] = ()


def describe(name: str, network: Network, task: Task, origin: Origin | None) -> str:
    """Describe a model in several lines: its task, sizes, attention, number of parameters, and checkpoint."""
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
