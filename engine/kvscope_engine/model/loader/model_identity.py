"""Identity of a model in memory: everything that determines its weights and the results of its code on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from kvscope_engine.model.platforms.device import cpu_flags, dtype_name
from kvscope_engine.program_identity import program_identity
from kvscope_kernels.cpu.library import library

NUM_SAMPLES: Final = 16
SAMPLE_BYTES: Final = 1 << 16
"""Size of each sample, of which `NUM_SAMPLES` are spread evenly over a file of weights."""
_VARIABLES: Final = ("ATEN_", "DNNL_", "KVSCOPE_NATIVE", "MKL_", "OMP_", "ONEDNN_", "TORCH")
"""Start of the names of environment variables that change how torch or kvscope computes."""


def model_identity(files: Iterable[Path], dtype: torch.dtype, quantization: str, num_threads: int) -> str:
    """Return a text that changes with the model on the CPU, and with the code and the settings that run it.

    Args:
        files: All files that the model was read from, and the file of its class. A file is identified by its size,
            inode, times of change (mtime and ctime), and samples of its content.
        num_threads: Number of threads that compute a step on an idle machine.
    """
    native = library()
    return json.dumps(
        {
            "files": [_file_identity(path) for path in files],
            "dtype": dtype_name(dtype),
            "quantization": quantization,
            "program": program_identity(),
            "library": Path(native._name).name if native is not None else "",
            "cpu": [platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(cpu_flags())],
            "threads": num_threads,
            "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
        }
    )


def _file_identity(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256()
        for index in range(NUM_SAMPLES):
            file.seek(max(status.st_size - SAMPLE_BYTES, 0) * index // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return [
        str(path.resolve()),
        status.st_size,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
        digest.hexdigest(),
    ]
