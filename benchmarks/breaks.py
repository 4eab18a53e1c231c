"""One-line bugs, each of which a test must catch: a table of more than a hundred, and others drawn at random.

    python benchmarks/breaks.py                         the table, about half an hour on one core
    python benchmarks/breaks.py --only alibi_slopes     some of its rows, by name
    python benchmarks/breaks.py --unbroken              their tests on the code as it is, which must pass
    python benchmarks/breaks.py --draw 100 --seed 1     mutants of the whole package, about three hours of two cores
    python benchmarks/breaks.py --json breaks.json      also write the outcomes to a file

Each bug is put alone into a copy of the repository, and tests are run there: it is "caught" if one fails, and has
"survived" if all pass. A row of the table names its tests. Of a mutant, those tests run first that import its file, or
that import what imports it, then the fast tier, then the slow one. Exit codes: 0 if all were caught, 1 if one survived,
2 if the table does not fit the code: an old text that does not occur exactly once in its file, or tests that cannot be
run. If you move the code, update the table.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants import Mutant, draw

ROOT = Path(__file__).resolve().parent.parent

NOT_COPIED = shutil.ignore_patterns(
    ".git", "outputs", "multirun", "cache", "*.ckpt", "__pycache__", ".venv", "venv", "build", "*.egg-info", ".*_cache"
)

FAST, TIERS = "not slow and not nightly and not gpu", "not nightly and not gpu"
SLOW = "slow and not nightly and not timed and not gpu"
# One process, and no checks of types, which would double the time.
PYTEST_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", "--override-ini=addopts=--strict-markers")
LIMIT = 1200
"""Seconds before a test run is stopped."""


@dataclass(frozen=True)
class Break:
    """A bug in one line.

    Attributes:
        name: its name, for `--only`.
        file: the file, relative to the package.
        old: a part of one line, which occurs exactly once in the file.
        new: the text that replaces it.
        tests: arguments of pytest: the test files that must catch it, narrowed by `-k` if they take long.
        marker: the marker expression of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    marker: str = FAST

    def applied(self, text: str) -> str:
        """The text of the file with the bug."""
        return text.replace(self.old, self.new)


BREAKS = (
    # nn: attention
    Break(
        "clipped_by_the_norm_before_own_callbacks",
        "run/trainer.py",
        "(isinstance(each, Snapshots), isinstance(each, FiniteCheck))",
        "isinstance(each, Snapshots)",
        ("tests/training/test_optimizers.py", "-k", "clipped"),
    ),
    Break(
        "short_runs_are_compiled",
        "run/network.py",
        ">= MIN_SECONDS_TO_COMPILE",
        ">= 0.9 * MIN_SECONDS_TO_COMPILE",
        ("tests/run/test_compiling.py",),
    ),
    Break(
        "resumed_runs_decide_anew",
        "run/network.py",
        "if earlier is None else earlier",
        "or earlier",
        ("tests/run/test_compiling.py",),
    ),
    Break(
        "the_cache_of_another_version_is_read",
        "run/network.py",
        "torch.__version__, FORMAT",
        "FORMAT",
        ("tests/run/test_measured_backends.py",),
    ),
    Break(
        "measuring_draws_random_numbers",
        "run/network.py",
        "torch.random.fork_rng(devices=[]), ",
        "",
        ("tests/run/test_measured_backends.py",),
    ),
    Break(
        "eager_at_the_last_key_of_short_decoding",
        "nn/kernels/choose.py",
        "<= DECODING_SDPA_MAX_SEQ:",
        "< DECODING_SDPA_MAX_SEQ:",
        ("tests/nn/test_support.py",),
    ),
    Break(
        "prompts_share_a_generator",
        "generation/generation.py",
        "[generators[row] for row in read]",
        "[generators[0] for row in read]",
        ("tests/generation/test_generation.py",),
    ),
    Break(
        "position_across_sequences",
        "nn/attention.py",
        "if context is None:",
        "if x is not None:",
        ("tests/nn/test_laws.py", "-k", "across_two_sequences"),
    ),
    Break(
        "sums_read_across_documents",
        "nn/shift.py",
        "documents = None if mask is None else mask.documents",
        "documents = None",
        ("tests/nn/test_shift.py",),
    ),
    Break(
        "shifted_keys_weigh_the_previous_token",
        "nn/shift.py",
        "torch.stack([share, 1 - share])",
        "torch.stack([1 - share, share])",
        ("tests/nn/test_shift.py",),
    ),
    Break(
        "sums_of_pruned_heads",
        "nn/heads.py",
        "in layer.sums.items():",
        "in ():",
        ("tests/nn/test_prune.py",),
    ),
    Break(
        "gates_forget_the_cache",
        "nn/forget.py",
        "sums = sums + held.tensors[0][..., -1:, 0]",
        "pass",
        ("tests/nn/test_laws.py", "-k", "decoding"),
    ),
    Break(
        "decay_in_one_bf16_dimension",
        "nn/kernels/sdpa.py",
        "c - high - middle], dim=-1)",
        "c * 0], dim=-1)",
        ("tests/nn/test_backends.py",),
    ),
    Break(
        "exclusive_of_the_first_values",
        "nn/heads.py",
        "v[..., -heads.shape[2] :, :].repeat",
        "v[..., : heads.shape[2], :].repeat",
        ("tests/nn/test_laws.py", "-k", "decoding"),
    ),
    Break(
        "yarn_with_swapped_rotations",
        "nn/frequencies.py",
        "for turns in (32, 1))",
        "for turns in (1, 32))",
        ("tests/nn/test_frequencies.py",),
    ),
    Break(
        "own_and_first_values_swapped",
        "nn/side_inputs.py",
        "torch.tensor([1 - share, share])",
        "torch.tensor([share, 1 - share])",
        ("tests/nn/test_side_inputs.py",),
    ),
    Break(
        "maps_padded_on_the_wrong_side",
        "nn/maps.py",
        "F.pad(maps.weights, padding)",
        "F.pad(maps.weights, padding[::-1])",
        ("tests/nn/test_cache.py", "-k", "captured"),
    ),
    Break(
        "rotary_forgets_what_the_window_left_behind",
        "nn/attention.py",
        "offset = cache.length if cache else 0",
        "offset = cache.num_held if cache else 0",
        ("tests/nn/test_cache.py", "-k", "decode"),
    ),
    Break(
        "latents_with_biased_keys",
        "nn/latent.py",
        "and self.k_proj.bias is None ",
        "",
        ("tests/nn/test_cache.py", "-k", "latent"),
    ),
    Break(
        "lambda_of_the_next_layer",
        "nn/differential.py",
        "math.exp(-0.3 * self.layer_index)",
        "math.exp(-0.3 * (self.layer_index + 1))",
        ("tests/nn/test_formulas.py", "-k", "differential"),
    ),
    Break(
        "copy_of_a_cache_forgets_its_length",
        "nn/cache.py",
        "other.length, other.num_held, other.num_queries = self.length,",
        "other.length, other.num_held, other.num_queries = self.num_held,",
        ("tests/nn/test_cache.py", "-k", "copy or captured"),
    ),
    Break(
        "heads_renumbered_by_pruning",
        "nn/heads.py",
        "torch.tensor(self.ids, device=device)",
        "torch.tensor(indices, device=device)",
        ("tests/nn/test_prune.py", "-k", "twice"),
    ),
    Break(
        "documents_lose_their_last_keys",
        "nn/mask.py",
        "self.documents[:, num_keys:]",
        "self.documents[:, :-num_keys]",
        ("tests/nn/test_mask.py", "tests/nn/test_cache.py", "-k", "first_keys or packed"),
    ),
    Break(
        "alibi_slopes",
        "nn/position.py",
        "_alibi_slopes(2 * power)[::2]",
        "_alibi_slopes(2 * power)[1::2]",
        ("tests/nn/test_formulas.py", "-k", "alibi"),
    ),
    # nn: kernels
    Break(
        "softmax_in_low_precision",
        "nn/kernels/eager.py",
        "scores = scores.to(torch.promote_types(scores.dtype, torch.float32))",
        "scores = scores.to(scores.dtype)",
        ("tests/nn/test_backends.py", "-k", "low_precision or normalised"),
    ),
    Break(
        "sink_behind_the_mask",
        "nn/kernels/sdpa.py",
        "F.pad(allowed, (1, 0), value=True)",
        "F.pad(allowed, (1, 0), value=False)",
        ("tests/nn/test_backends.py", "-k", "every_variant_is_exact and sink and fp32"),
    ),
    Break(
        "flex_scores_from_position_zero",
        "nn/kernels/flex.py",
        "Grid(batch, head, q_idx + first, kv_idx)",
        "Grid(batch, head, q_idx, kv_idx)",
        ("tests/nn/test_laws.py", "-k", "decoding"),
    ),
    Break(
        "packed_sequences_without_a_window",
        "nn/kernels/flash.py",
        "window_size=mask.span",
        "window_size=(-1, mask.span[1])",
        ("tests/nn/test_varlen.py",),
    ),
    Break(
        "padding_in_a_window_not_announced",
        "nn/kernels/choose.py",
        "padded and (mask.causal or windowed)",
        "padded and mask.causal",
        ("tests/nn/test_support.py",),
    ),
    # data
    Break(
        "masks_of_the_first_epoch_are_the_evaluations",
        "data/batches/loader.py",
        "MaskedWindows(windows, self._masker, epoch + 1)",
        "MaskedWindows(windows, self._masker, epoch)",
        ("tests/data/test_masking.py",),
    ),
    Break(
        "the_same_tokens_dropped_in_each_epoch",
        "data/examples.py",
        "Examples(split, self._token_dropout, (seed, epoch))",
        "Examples(split, self._token_dropout, (seed,))",
        ("tests/data/test_examples.py",),
    ),
    Break(
        "max_tokens_forgets_what_is_held_out",
        "data/recipe.py",
        "self.tokenizer.characters_per_token / training_share)",
        "self.tokenizer.characters_per_token)",
        ("tests/data/test_store.py",),
    ),
    Break(
        "near_copies_of_few_examples_parted",
        "data/splits.py",
        "elif whole.max(initial=0) < len(fractions):",
        "else:",
        ("tests/data/test_splits.py",),
    ),
    Break(
        "one_document_makes_up_a_split",
        "data/splits.py",
        "for share in (_LARGEST, 1)",
        "for share in (1,)",
        ("tests/data/test_splits.py",),
    ),
    Break(
        "last_token_never_drawn",
        "data/batches/masking.py",
        "(other * self._vocab_size)",
        "(other * (self._vocab_size - 1))",
        ("tests/data/test_masking.py",),
    ),
    Break(
        "one_window_too_many",
        "data/batches/windows.py",
        "return (len(self._ids) - 1 - self._phase) // self._seq_len",
        "return (len(self._ids) - self._phase) // self._seq_len",
        ("tests/data/test_windows.py",),
    ),
    Break(
        "eos_in_the_document_before",
        "data/batches/windows.py",
        'np.searchsorted(self._offsets, positions, side="right")',
        'np.searchsorted(self._offsets, positions, side="left")',
        ("tests/data/test_windows.py",),
    ),
    Break(
        "runs_as_long_as_the_shorter_text",
        "data/splits.py",
        "-(-lengths // 2)",
        "lengths",
        ("tests/data/test_splits.py",),
    ),
    Break(
        "the_unknowable_symbol_scored",
        "data/generated/sequences.py",
        "position > period",
        "position >= period",
        ("tests/data/test_generated.py",),
    ),
    Break(
        "half_of_an_odd_length",
        "data/examples.py",
        "np.maximum(max_length - second, max_length - max_length // 2)",
        "np.maximum(max_length - second, max_length // 2)",
        ("tests/data/test_examples.py", "-k", "pair"),
    ),
    Break(
        "another_column_from_the_same_cache",
        "data/sources/hub_dataset.py",
        "commit, self.text_columns, self.rejoin_splits",
        "commit, self.rejoin_splits",
        ("tests/data/test_hub.py",),
    ),
    # tasks
    Break(
        "bits_per_character",
        "tasks/task.py",
        "bits / split.num_bytes",
        "bits / split.num_characters",
        ("tests/tasks/test_losses_and_metrics.py",),
    ),
    Break(
        "all_positions_hidden_at_once",
        "tasks/task.py",
        "tokens[rows, masked] = mask_id",
        "tokens[:, masked] = mask_id",
        ("tests/tasks/test_losses_and_metrics.py",),
    ),
    Break(
        "majority_of_the_predictions",
        "tasks/classification.py",
        "confusion.sum(dim=1).max()",
        "confusion.sum(dim=0).max()",
        ("tests/tasks/test_losses_and_metrics.py",),
    ),
    # analysis
    Break(
        "resampled_from_another_head",
        "analysis/removal/ablation.py",
        "outputs.roll(1, dims=0)",
        "outputs.roll(1, dims=1)",
        ("tests/analysis/test_ablation.py",),
    ),
    Break(
        "resampled_from_padding",
        "analysis/removal/ablation.py",
        "torch.where(place < ends, place,",
        "torch.where(place >= 0, place,",
        ("tests/analysis/test_ablation.py",),
    ),
    Break(
        "padding_in_mean_outputs",
        "measures/batches.py",
        "device=tokens.device) < lengths.unsqueeze(1)",
        "device=tokens.device) <= lengths.unsqueeze(1)",
        ("tests/analysis/test_ablation.py",),
    ),
    Break(
        "importance_of_long_windows",
        "analysis/removal/ablation.py",
        "(nats / targets.clamp(min=1)).sum()",
        "nats.sum()",
        ("tests/analysis/test_ablation.py",),
    ),
    Break(
        "visible_pairs_off_by_half_a_window",
        "costs/network.py",
        "corner * (corner + 1) // 2",
        "corner * corner // 2",
        ("tests/analysis/test_costs.py", "-k", "visible or hidden or window or pairs"),
    ),
    Break(
        "hysteresis_on_the_wrong_side",
        "measures/events.py",
        "(1 - sign * slack)",
        "(1 - slack)",
        ("tests/analysis/test_measures.py",),
    ),
    Break(
        "bootstrap_divided_by_all_targets",
        "measures/intervals.py",
        "self.targets[draws].sum(dim=1)",
        "self.targets.sum()",
        ("tests/analysis/test_ablation.py",),
    ),
    # training
    Break(
        "loss_of_a_part_of_a_step",
        "training/callbacks/metrics.py",
        "nats = nats * trainer.accumulate_grad_batches",
        "pass",
        ("tests/training/test_steps.py", "-k", "one_batch or fp64"),
    ),
    Break(
        "batches_of_a_step_weighted_alike",
        "training/step.py",
        "return loss * (targets / unit)",
        "return loss",
        ("tests/training/test_steps.py", "-k", "one_batch or fp64"),
    ),
    Break(
        "tokens_of_one_process",
        "training/callbacks/metrics.py",
        "tokens * trainer.world_size",
        "tokens",
        ("tests/training/test_steps.py", "-k", "one_batch or fp64"),
    ),
    Break(
        "an_equal_score_is_better",
        "training/callbacks/checkpoints.py",
        "return value > self.best_value if",
        "return value >= self.best_value if",
        ("tests/training/test_callbacks.py",),
    ),
    Break(
        "sums_in_bf16",
        "training/step.py",
        "else torch.float64",
        "else self.dtype",
        ("tests/training/test_steps.py", "-k", "one_batch or fp64"),
    ),
    Break(
        "fused_step_undoes_the_loss_scaling",
        "training/optimizers.py",
        "optimizer._step_supports_amp_scaling = False",
        "optimizer._step_supports_amp_scaling = True",
        ("tests/training/test_optimizers.py",),
    ),
    Break(
        "muon_on_the_readout",
        "training/optimizers.py",
        'parameter not in embeddings and not name.startswith("readout.")',
        "parameter not in embeddings",
        ("tests/training/test_optimizers.py",),
    ),
    Break(
        "a_warm_up_that_begins_with_nothing",
        "training/optimizers.py",
        "(step + 1) / (self.warmup_steps + 1)",
        "step / (self.warmup_steps + 1)",
        ("tests/training/test_optimizers.py", "-k", "by_hand"),
    ),
    # checkpoints, generation, the model in Python
    Break(
        "labels_ignored_by_a_start",
        "run/starting_checkpoint.py",
        '(own["readout"]["_target_"], own["labels"]) == (task["readout"]["_target_"], task["labels"])',
        'own["readout"]["_target_"] == task["readout"]["_target_"]',
        ("tests/config/test_admission.py",),
    ),
    Break(
        "checkpoint_not_written_whole",
        "checkpoint/format.py",
        "with atomic_write(path, previous) as temporary:",
        'with path.open("wb") as temporary:',
        ("tests/checkpoint/test_file.py",),
    ),
    Break(
        "whatever_our_modules_import_is_trusted",
        "config/admission.py",
        "isinstance(value, type) and value.__module__.startswith(OF_MODELS)",
        "isinstance(value, type)",
        ("tests/config/test_admission.py",),
    ),
    Break(
        "top_p_without_the_token_that_reaches_it",
        "generation/generation.py",
        "ordered.cumsum(dim=-1) - ordered >= self.top_p",
        "ordered.cumsum(dim=-1) >= self.top_p",
        ("tests/generation/test_generation.py",),
    ),
    Break(
        "a_vector_of_padding",
        "measures/points.py",
        ">= lengths.unsqueeze(1)",
        "> lengths.unsqueeze(1)",
        ("tests/model/test_model.py",),
    ),
    # interop
    Break(
        "the_vector_of_another_type",
        "interop/bert.py",
        "weights.pop(TYPES)[0]",
        "weights.pop(TYPES)[-1]",
        ("tests/interop/test_encoders.py",),
    ),
    Break(
        "a_scale_without_one",
        "nn/layers.py",
        "weight = 1 + self.weight.to(dtype) if self.zero_centered",
        "weight = self.weight.to(dtype) if self.zero_centered",
        ("tests/interop/test_import.py", "-k", "gemma"),
    ),
    Break(
        "rows_of_padding",
        "interop/family.py",
        "[self._transpose(tensor)[self.skipped :]]",
        "[self._transpose(tensor)[: -self.skipped or None]]",
        ("tests/interop/test_import.py", "-k", "roberta"),
    ),
    Break(
        "rows_of_a_head_in_their_order",
        "interop/family.py",
        "inverse = self.order(attention).argsort()",
        "inverse = self.order(attention)",
        ("tests/interop/test_import.py", "-k", "gpt-j"),
    ),
    Break(
        "windows_in_all_layers",
        "interop/layers.py",
        "[window if kind == SLIDING else None for kind in types]",
        "[window for kind in types]",
        ("tests/interop/test_import.py", "-k", "olmo or gemma"),
    ),
    Break(
        "a_field_that_is_ignored",
        "interop/layers.py",
        "if value is not None and value != ROPE_ONLY.get(kind, {}).get(name):",
        "if value is not None and value == ROPE_ONLY.get(kind, {}).get(name):",
        ("tests/interop/test_families.py",),
    ),
    Break(
        "pairs_of_rows_of_a_gguf_file",
        "interop/gguf.py",
        ".transpose(1, 2).flatten(0, 2)",
        ".flatten(0, 2)",
        ("tests/interop/test_gguf.py",),
    ),
    Break(
        "a_cased_vocabulary_by_default",
        "interop/vocabulary.py",
        'settings.get("do_lower_case", True)',
        'settings.get("do_lower_case", False)',
        ("tests/interop/test_vocabulary.py",),
    ),
    # model
    Break(
        "weights_of_queries_before_they_are_replaced",
        "measures/points.py",
        "for name, point in points.items() if name in replaced or",
        "for name, point in reversed(points.items()) if name in replaced or",
        ("tests/analysis/test_points.py", "-k", "order"),
    ),
    Break(
        "replaced_weights_without_the_vectors_of_positions",
        "nn/attention.py",
        "mix = None if is_cross else self.position.mix(*weights.shape[-2:])",
        "mix = None",
        ("tests/analysis/test_points.py", "-k", "own_values and relative"),
    ),
    Break(
        "padding_among_the_tokens_of_an_ablation",
        "analysis/removal/ablation.py",
        ".masked_fill(~is_token[:, None, :, None], 0)",
        "",
        ("tests/model/test_ablated.py", "-k", "chooses"),
    ),
    Break(
        "resampled_at_the_first_positions_behind_a_cache",
        "model/ablation.py",
        'first = begins[stacks[0 if context.kinds[layer] == "encoder" else -1]]',
        "first = 0",
        ("tests/model/test_ablated.py", "-k", "chooses"),
    ),
    Break(
        "text_that_predicts_its_padding",
        "tasks/task.py",
        'batch["lengths"].unsqueeze(1) - 1',
        'batch["lengths"].unsqueeze(1)',
        ("tests/model/test_loss.py", "-k", "by_hand"),
    ),
    # app
    Break(
        "test_of_the_last_weights",
        "run/evaluation.py",
        "load_checkpoint(run.checkpoints.best)",
        "load_checkpoint(run.checkpoints.last)",
        ("tests/test_tasks.py", "-k", "best_weights"),
        TIERS,
    ),
    Break(
        "training_text_scored_with_the_rest",
        "run/data.py",
        '("validation" if is_own or not data.scored_whole else "all")',
        '("validation" if not data.scored_whole else "all")',
        ("tests/test_evaluate.py::test_it_gives_the_loss_of_the_run",),
    ),
    Break(
        "old_overrides_win",
        "config/resume.py",
        "return [*options, *held, *overrides, *new,",
        "return [*options, *held, *new, *overrides,",
        ("tests/config/test_command_line.py",),
    ),
    Break(
        "null_fits_everything",
        "config/checks.py",
        "not (value is None and key in RUNTIME_KEYS)",
        "value is not None",
        ("tests/config/test_mistakes.py", "-k", "null"),
    ),
    Break(
        "a_key_of_all_choices_belongs_to_some",
        "config/errors.py",
        "if 0 < len(having) < len(choices)",
        "if 0 < len(having)",
        ("tests/config/test_mistakes.py", "-k", "reported"),
    ),
    Break(
        "one_batch_is_the_whole",
        "run/results.py",
        "not (isinstance(limit, float) and limit == 1.0)",
        "limit != 1.0",
        ("tests/test_evaluate.py::test_no_number_of_tokens_is_claimed_where_a_part_is_scored",),
        TIERS,
    ),
    # programs of their own
    Break(
        "a_wrong_eager_excuses_the_others",
        "programs/doctor/cells.py",
        "allowed = min(CEILING[dtype], max(FLOOR[dtype], FACTOR * (yardstick or 0.0)))",
        "allowed = max(FLOOR[dtype], FACTOR * (yardstick or 0.0))",
        ("tests/programs/test_doctor.py", "-k", "errors_of_eager"),
    ),
    Break(
        "gradients_of_a_row_without_keys",
        "programs/doctor/exactness.py",
        "for value in (solution.output, *input_gradients))",
        "for value in (solution.output,))",
        ("tests/programs/test_doctor.py", "-k", "broken_backend"),
    ),
    Break(
        "spread_of_the_whole_population",
        "programs/compare/comparison.py",
        "statistics.stdev(self.values)",
        "statistics.pstdev(self.values)",
        ("tests/programs/test_compare.py",),
    ),
    Break(
        "what_is_averaged_over_makes_settings",
        "programs/compare/comparison.py",
        'key != by and not key.startswith(f"{by}.")',
        "key != by",
        ("tests/programs/test_compare.py",),
    ),
    Break(
        "skipped_pairs_counted",
        "programs/card.py",
        '"attended_flops_per_token"',
        '"flops_per_token"',
        ("tests/programs/test_card.py",),
    ),
    Break(
        "biases_exported_as_zeros",
        "programs/convert/conversion.py",
        "weights=zeros | checkpoint.weights",
        "weights=checkpoint.weights | zeros",
        ("tests/interop/test_export.py", "-k", "logits_text"),
    ),
    # findings, generated data, the search of targets
    Break(
        "premise_fails_a_claim",
        "programs/findings/verdicts.py",
        "if FAILS in premises:",
        "if False:",
        ("tests/programs/findings/test_verdicts.py",),
    ),
    Break(
        "delay_without_the_second_level",
        "programs/findings/quantities.py",
        "return step / other_step if other_step < math.inf else math.nan",
        "return step / other_step",
        ("tests/programs/findings/test_quantities.py",),
    ),
    Break(
        "a_changed_band_is_called_unchanged",
        "programs/findings/outcomes.py",
        '{*stated} == {last["digest"]}',
        "True",
        ("tests/programs/findings/test_statements.py", "tests/programs/findings/test_findings.py"),
        TIERS,
    ),
    Break(
        "size_below_the_match",
        "run/match.py",
        "return min((max(above - 1, 1), above), key=lambda number: abs(count(number) - target))",
        "return max(above - 1, 1)",
        ("tests/run/test_match.py",),
        TIERS,
    ),
    Break(
        "random_heads_of_any_number",
        "analysis/removal/circuit.py",
        "order[: sum(at == layer for at, _ in found)]",
        "order[: len(found)]",
        ("tests/analysis/test_ablation.py",),
    ),
    Break(
        "smaller_of_two_softmaxes",
        "analysis/removal/circuit.py",
        "name: max(of[index]",
        "name: min(of[index]",
        ("tests/analysis/test_ablation.py",),
    ),
    Break(
        "same_pairs_choose_and_test",
        "analysis/texts/alignment.py",
        "halves = pairs[::2], pairs[1::2]",
        "halves = pairs, pairs",
        ("tests/analysis/test_words.py",),
    ),
    Break(
        "validation_sequences_are_trained_on",
        "data/generated/module.py",
        ".rows(np.array(is_unseen))",
        ".rows(np.array(is_unseen) | True)",
        ("tests/data/test_generated.py",),
    ),
    Break(
        "later_epochs_hold_validation_sequences",
        "data/generated/module.py",
        "if not held_out.any():",
        "if True:",
        ("tests/data/test_generated.py",),
    ),
    Break(
        "keys_are_scored",
        "data/generated/sequences.py",
        "np.put_along_axis(scored, 2 * slots + 1, True, axis=1)",
        "np.put_along_axis(scored, 2 * slots, True, axis=1)",
        ("tests/data/test_generated.py",),
    ),
    Break(
        "rollout_from_the_last_layer",
        "model/text_maps.py",
        "F.normalize(mixed, p=1, dim=-1) @ total",
        "total @ F.normalize(mixed, p=1, dim=-1)",
        ("tests/model/test_text_maps.py",),
    ),
    Break(
        "beams_end_at_the_first",
        "generation/generation.py",
        "(ended[:, -1] < open_scores",
        "(ended[:, 0] < open_scores",
        ("tests/interop/test_encoder_decoders.py", "-k", "greedy_and_beam_search"),
        TIERS,
    ),
    Break(
        "suppressed_tokens_are_generated",
        "generation/generation.py",
        "[*special.suppressed, *range",
        "[*range",
        ("tests/interop/test_encoder_decoders.py", "-k", "greedy_and_beam_search"),
        TIERS,
    ),
    # analysis: mechanism, atlas, snapshots
    Break(
        "gates_that_sink_to_the_bound_are_needed",
        "analysis/causes/gates.py",
        "needed >= LEAST_NEEDED",
        "needed >= 0.0",
        ("tests/analysis/causes/test_gates.py",),
    ),
    Break(
        "lens_of_the_output_from_itself",
        "analysis/causes/lens.py",
        "F.kl_div(log_q, p,",
        "F.kl_div(p, log_q,",
        ("tests/analysis/causes/test_lens.py",),
    ),
    Break(
        "copying_score_by_absolute_parts",
        "analysis/causes/weights.py",
        "eigenvalues.real.sum(dim=-1)",
        "eigenvalues.real.abs().sum(dim=-1)",
        ("tests/analysis/causes/test_weights.py",),
    ),
    Break(
        "circuit_of_edges_that_lead_nowhere",
        "analysis/causes/edges.py",
        "return kept & reached.unsqueeze(1) & (self.ends & used).any(dim=1)",
        "return kept & reached.unsqueeze(1)",
        ("tests/analysis/causes/test_edges.py",),
    ),
    Break(
        "events_by_weight_alone",
        "analysis/atlas/events.py",
        "(weights * norms[:, :, None, keys]).amax",
        "weights.amax",
        ("tests/analysis/test_events.py",),
    ),
    Break(
        "deciles_off_by_one",
        "analysis/atlas/snippets.py",
        "(10 * middles).long() + 1 +",
        "(10 * middles).long() +",
        ("tests/analysis/test_events.py",),
    ),
    Break(
        "reservoir_of_the_largest",
        "analysis/atlas/tally.py",
        'entries["score"].argsort(stable=True)',
        'entries["score"].argsort(stable=True, descending=True)',
        ("tests/analysis/test_events.py",),
    ),
    Break(
        "snippet_beyond_its_document",
        "analysis/atlas/tally.py",
        "(first + STRETCH).minimum(ends)",
        "(first + STRETCH)",
        ("tests/analysis/test_events.py",),
    ),
    Break(
        "previous_token_two_back",
        "analysis/atlas/tally.py",
        "[self.max_seq_len - 2] * 2",
        "[self.max_seq_len - 3] * 2",
        ("tests/analysis/test_events.py",),
    ),
    Break(
        "snapshots_at_even_steps",
        "training/callbacks/checkpoints.py",
        "step & (step - 1) == 0",
        "step % 2 == 0",
        ("tests/training/test_snapshots.py",),
    ),
    Break(
        "snapshot_of_the_step_resumed_from_is_lost",
        "training/callbacks/checkpoints.py",
        "if step > first or first == 0",
        "if step >= first",
        ("tests/training/test_snapshots.py", "tests/faults/test_interrupted.py", "-k", "snapshots"),
    ),
    Break(
        "biased_kernel_alignment",
        "analysis/over_training/dynamics.py",
        "((n - 1) * (n - 2))",
        "(n * n)",
        ("tests/analysis/over_training/test_similarity.py",),
    ),
    Break(
        "gradient_of_a_circuit_without_its_second_factor",
        "analysis/over_training/dynamics.py",
        "torch.cat([grad_a.mT, a.mT], dim=-1)",
        "torch.cat([grad_a.mT, 0 * a.mT], dim=-1)",
        ("tests/analysis/over_training/test_dynamics.py",),
    ),
    Break(
        "film_of_linear_weights",
        "report/page.py",
        "(weights.float().clamp(0, 1).sqrt() * 255)",
        "(weights.float().clamp(0, 1) * 255)",
        ("tests/analysis/test_film.py", "tests/analysis/test_events.py"),
        TIERS,
    ),
    Break(
        "nearest_step_is_the_farthest",
        "checkpoint/file.py",
        "min(near, key=",
        "max(near, key=",
        ("tests/training/test_snapshots.py",),
    ),
    # CUDA, as far as a CPU sees it
    Break(
        "gradient_of_compiled_cross_entropy_without_the_target",
        "nn/readout.py",
        "(probabilities - is_target.to(pull.dtype))",
        "probabilities",
        ("tests/nn/test_layers.py",),
    ),
    Break(
        "columns_of_padding_are_tokens",
        "nn/readout.py",
        "device=scores.device) >= vocab_size",
        "device=scores.device) > vocab_size + 64",
        ("tests/nn/test_layers.py",),
    ),
    Break(
        "graphs_of_documents",
        "run/network.py",
        "not varies and mask.documents is None",
        "not varies",
        ("tests/run/test_compiling.py",),
    ),
    Break(
        "flash_leaves_out_a_bias",
        "nn/kernels/flash.py",
        "mask.allowed is not None or scoring.mods or",
        "mask.allowed is not None or",
        ("tests/nn/test_varlen.py",),
    ),
    # sharding, and shards of text
    Break(
        "no_batch_for_the_others",
        "training/module.py",
        "self.last_batch = own - 1 if int(most) > own else -1",
        "self.last_batch = -1",
        ("tests/distributed/test_sharding.py", "-k", "measured"),
        SLOW,
    ),
    Break(
        "blocks_get_a_rounded_stream",
        "training/sharding.py",
        "torch.bfloat16, torch.float32, cast_forward_inputs=False",
        "torch.bfloat16, torch.float32",
        ("tests/distributed/test_sharding.py", "-k", "card"),
        SLOW,
    ),
    Break(
        "rows_of_another_process",
        "training/sharding.py",
        "own.device_mesh.get_local_rank() * -(-len(value)",
        "own.device_mesh.get_local_rank() * (len(value)",
        ("tests/distributed/test_sharding.py", "-k", "any_number"),
        SLOW,
    ),
    Break(
        "matrices_are_not_sent_back",
        "training/step.py",
        "(size, most)).transpose(0, 1).contiguous()",
        "(most, size)).transpose(1, 2).transpose(0, 1).contiguous()",
        ("tests/distributed/test_sharding.py", "-k", "muon"),
        SLOW,
    ),
    Break(
        "runs_of_a_sweep_share_a_store",
        "training/sharding.py",
        'f"run {next(_runs)}"',
        '"run"',
        ("tests/distributed/test_sharding.py", "-k", "measured"),
        SLOW,
    ),
    Break(
        "networks_of_earlier_runs_count_as_recompilations",
        "run/network.py",
        "torch.compiler.reset()",
        "pass",
        ("tests/run/test_compiling.py",),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a break.

    Attributes:
        name: the name of the break.
        outcome: "caught", "survived", or "error" if the tests could not be run.
        seconds: duration of the tests.
        by: the first test that failed; for an error, pytest's last lines.
    """

    name: str
    outcome: str
    seconds: float
    by: str = ""


def find_problems(breaks: Iterable[Break]) -> list[str]:
    """The rows that do not fit the code, one sentence for each."""
    problems = []
    for one in breaks:
        path = ROOT / "tinyformer" / one.file
        count = path.read_text(encoding="utf-8").count(one.old) if path.is_file() else 0
        if count != 1:
            problems.append(f"{one.name}: {one.old!r} must occur once in tinyformer/{one.file}, not {count} times.")
        if "\n" in one.old + one.new or one.old == one.new:
            problems.append(f"{one.name}: must change one line.")
        for test in (word for word in one.tests if word.startswith("tests/")):
            if not (ROOT / test.partition("::")[0]).is_file():
                problems.append(f"{one.name}: {test.partition('::')[0]} does not exist.")
    return problems


def run_tests(tree: Path, arguments: Sequence[str], marker: str) -> tuple[int, str]:
    """Pytest's exit code and output; -1 if it was stopped."""
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "TINYFORMER_CACHE")}
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS]
    try:
        ended = subprocess.run(
            [*command, "-m", marker, *arguments],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"took more than {LIMIT} s"
    return ended.returncode, ended.stdout + ended.stderr


def outcome_of(name: str, tree: Path, arguments: Sequence[str], marker: str) -> Outcome:
    """The outcome of some tests on a tree."""
    began = time.perf_counter()
    code, printed = run_tests(tree, arguments, marker)
    seconds = round(time.perf_counter() - began, 1)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", printed, re.MULTILINE)
    if code == 0:
        return Outcome(name, "survived", seconds)
    is_stopped = code == 2 and "stopping after 1 failures" in printed  # by `-x`, with several processes
    if (code == 1 or is_stopped) and failed:
        return Outcome(name, "caught", seconds, failed[1])
    return Outcome(name, "error", seconds, " | ".join(printed.strip().splitlines()[-3:]))


def try_bug(bug: Break | Mutant, tests: Sequence[str], tree: Path) -> Outcome:
    """Put a bug into the tree, run tests, and restore it; those of a mutant are followed by all others."""
    path = tree / "tinyformer" / bug.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(bug.applied(whole), encoding="utf-8")
    try:
        if isinstance(bug, Break):
            return outcome_of(bug.name, tree, tests, bug.marker)
        for arguments, marker in ((tests, FAST), (["tests"], FAST), (["tests"], SLOW)):
            outcome = outcome_of(bug.name, tree, [*arguments, "-n", "2"], marker)
            if outcome.outcome == "caught" or (outcome.outcome == "error" and arguments == ["tests"]):
                break  # the nearest tests may all be slow, which is an error of the first run
        return outcome
    finally:
        path.write_text(whole, encoding="utf-8")


def try_unbroken(breaks: Sequence[Break], tree: Path) -> int:
    """Run the tests of the breaks on the code as it is.

    Returns:
        The exit code: 0 if all pass, otherwise 2.
    """
    failed = False
    for arguments, marker in dict.fromkeys((one.tests, one.marker) for one in breaks):
        outcome = outcome_of(" ".join(arguments), tree, arguments, marker)
        failed |= outcome.outcome != "survived"
        said = "passes" if outcome.outcome == "survived" else f"FAILS: {outcome.by}"
        print(f"{outcome.seconds:6.1f} s  {outcome.name}  {said}", flush=True)
    return 2 if failed else 0


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes so far."""
    caught = sum(one.outcome == "caught" for one in outcomes)
    record = {
        "caught": caught,
        "total": len(outcomes),
        "survived": [one.name for one in outcomes if one.outcome == "survived"],
        "breaks": [asdict(one) for one in outcomes],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Try the breaks that the command line names.

    Returns:
        The exit code: 0 if all were caught, 1 if one survived, 2 if the table does not fit the code.
    """
    parser = argparse.ArgumentParser(description="One-line bugs, each of which a test must catch.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="try these breaks only")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="try N mutants in place of the table")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file")
    parser.add_argument("--unbroken", action="store_true", help="run the tests on the code as it is")
    options = parser.parse_args()
    breaks = [one for one in BREAKS if options.only is None or one.name in options.only]
    drawn = list(draw(options.draw, options.seed))
    problems = [
        f"{name}: there is no such break." for name in options.only or () if name not in {b.name for b in BREAKS}
    ]
    problems += find_problems(breaks)
    if len({one.name for one in BREAKS}) < len(BREAKS):
        problems.append("Two breaks have the same name.")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        if options.unbroken:
            return try_unbroken(breaks, tree)
        for bug, tests in drawn or [(one, one.tests) for one in breaks]:
            outcomes.append(outcome := try_bug(bug, tests, tree))
            print(f"{outcome.outcome:<9} {outcome.seconds:6.1f} s  {bug.name:<48} {outcome.by}", flush=True)
            if options.json:
                write(options.json, outcomes)
    survived = [one.name for one in outcomes if one.outcome == "survived"]
    errors = [one.name for one in outcomes if one.outcome == "error"]
    print(f"\n{len(outcomes) - len(survived) - len(errors)} of {len(outcomes)} caught.")
    for said, names in (("survived", survived), ("error", errors)):
        if names:
            print(f"{said}: {', '.join(names)}")
    return 2 if errors else int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
