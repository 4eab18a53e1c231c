"""A CUDA device that computes nothing, for tests of all that a GPU run does beside arithmetic.

Memory is the host's and kernels do not run, so no number means anything. What is real: torch's dispatcher and autograd
on CUDA tensors, its choice of kernels, Lightning's handling of devices, `torch.compile` down to machine code for sm_90,
and the number of launches and of waits for the device. Needs torch as built for CUDA, and a C compiler; see
`.ci/standin`.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

HERE = Path(__file__).parent
SOURCES = {"runtime.c": "runtime.so", "driver.c": "libcuda.so.1"}
MEMORY_KB = 20_000_000
"""Of address space: a size that a kernel should have computed is whatever lay there, and may be terabytes."""


@dataclass(frozen=True)
class Report:
    """The end of a script on the device: its exit code, its text, and the values that it reported."""

    code: int
    text: str
    values: dict[str, Any]


Run: TypeAlias = Callable[..., Report]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.standin)
            item.add_marker(pytest.mark.timeout(1200))  # torch compiles for minutes
            if torch.version.cuda is None or torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs torch as built for CUDA, and no GPU"))


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of a process on the device, whose libraries are built here."""
    folder = tmp_path_factory.mktemp("standin")
    include = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"
    for source, library in SOURCES.items():
        files = [HERE / "device" / source, "-o", folder / library]
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", f"-I{include}", *files], check=True)
    return {
        "LD_PRELOAD": str(folder / "runtime.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "STANDIN": str(folder),
        "PORT": str(find_free_network_port()),
    }


@pytest.fixture
def run(device: dict[str, str], tmp_path: Path) -> Run:
    """Run a script of this folder on the device: `run("run_program.py", "train.py", "trainer=gpu …")`.

    With several processes it is one of them, as on a node of torchrun that has one GPU.
    """

    def start(script: str, *words: str, processes: int = 1, rank: int = 0) -> Report:
        report = tmp_path / f"report-{rank}.json"
        report.unlink(missing_ok=True)
        environment = os.environ | device | {"REPORT": str(report), "OMP_NUM_THREADS": "1"}
        if processes > 1:
            ranks = {"WORLD_SIZE": processes, "RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            ranks |= {"TORCHELASTIC_RUN_ID": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": device["PORT"]}
            environment |= {name: str(value) for name, value in ranks.items()}
        command = f'ulimit -v {MEMORY_KB}; exec "$@"'
        arguments = [sys.executable, str(HERE / script), *" ".join(words).split()]
        limited = ["bash", "-c", command, "-", *arguments]
        ended = subprocess.run(
            limited, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        values = json.loads(report.read_text()) if report.exists() else {}
        return Report(ended.returncode, ended.stdout + ended.stderr, values)

    return start
