"""What the entry points share: compose, errors, run folder, summary. Importing it costs no torch."""

from tinyformer.app.entry import run_program
from tinyformer.app.resume import expand_resume
from tinyformer.app.stored_run import compose_on_checkpoint

__all__ = ["compose_on_checkpoint", "expand_resume", "run_program"]
