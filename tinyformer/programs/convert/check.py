"""The comparison of an imported model with the model that `transformers` loads from the same files."""

from pathlib import Path
from typing import Any

import torch

from tinyformer.data.batches.windows import Batch
from tinyformer.errors import ArgumentError
from tinyformer.measures.capture import capture_attention
from tinyformer.model.loading import load
from tinyformer.nn import EncoderDecoder
from tinyformer.run.importing import family_of, open_source


def import_transformers(text: str) -> Any:
    """The library `transformers`, without its messages; an `ArgumentError` is raised if it is not installed."""
    try:
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise ArgumentError("check", text, "needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def compare(source: str, checkpoint: Path, text: str, revision: str | None) -> list[str]:
    """The largest differences of logits and maps between a checkpoint and its source on a text, as lines to print.

    `transformers` computes in fp32 with eager attention. The text is also the input of a decoder that has an encoder.

    Raises:
        ArgumentError: `transformers` cannot tokenise the text, or the text is too long.
    """
    transformers, model, found = import_transformers(text), load(checkpoint), open_source(source, revision)
    files: dict[str, Any] = {"pretrained_model_name_or_path": found.path}
    if found.path.is_file():
        files = {"pretrained_model_name_or_path": found.path.parent, "gguf_file": found.path.name}
    try:
        tokens = transformers.AutoTokenizer.from_pretrained(**files)(text)["input_ids"]
    except Exception as error:  # the class depends on what the folder lacks
        reason = f"transformers cannot tokenise it: {str(error).strip().splitlines()[0]}"
        raise ArgumentError("check", text, reason) from error
    same = "no tokenizer here"
    if model.origin and model.origin.checkpoint.tokenizer:
        same = "equal token ids" if model.tokenize(text)[0].tolist() == [tokens] else "other token ids"
    ids, lengths = model.tokenize(torch.tensor([tokens], dtype=torch.int64))

    architecture = getattr(transformers, family_of(found.fields, found.path).architecture)
    theirs = architecture.from_pretrained(**files, attn_implementation="eager", dtype=torch.float32).eval()
    is_pair = isinstance(model.network, EncoderDecoder)
    batch: Batch = {"inputs": ids, "lengths": lengths, "source_lengths": lengths}
    with capture_attention(model.network) as maps:
        ours = model.network(*(ids, ids) if is_pair else (ids,), model.task.mask(batch))
    given = {"decoder_input_ids": ids} if is_pair else {}
    expected = theirs(input_ids=ids, **given, output_attentions=True)
    name = "logits" if "logits" in expected else "last_hidden_state"
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions") if is_pair else ("attentions",)
    of_theirs = [layer for kind in kinds for layer in expected[kind]]
    differences = {
        (*address, head): difference
        for address, layer, other in zip(model.network.layer_addresses(), maps, of_theirs, strict=True)
        for head, difference in enumerate((layer - other).abs().amax(dim=(0, 2, 3)).tolist())
    }
    worst, most = max(differences, key=differences.__getitem__), (ours - expected[name]).abs().max()
    return [
        f"Compared with transformers {transformers.__version__}, on {len(tokens)} tokens ({same}):",
        f"  largest difference of {name}: {most:.1e}, where the largest is {expected[name].abs().max():.3g}",
        f"  largest difference of {len(differences)} maps: {differences[worst]:.1e}, of head {worst}",
    ]
