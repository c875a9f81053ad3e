"""Build the simulated device once for each state of its sources and each version of torch.

``python tests/accelerator/building.py`` builds it if it must, and says how long that took.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "device"
BUILDS = Path(__file__).parents[2] / "build" / "accelerator"
OBJECTS = BUILDS / "objects"  # ninja compiles again only what has changed
NAME = "sim_device"
FLAGS = ["-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def load() -> ModuleType:
    """The compiled module, built before if it has to be."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """The library; who comes while another process builds it waits for that one."""
    library = BUILDS / _key() / f"{NAME}.so"
    if library.exists():
        return library
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def _key() -> str:
    digest = hashlib.sha256(
        repr((torch.__version__, sysconfig.get_platform(), sys.version, FLAGS)).encode()
    )
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _build(library: Path) -> None:
    began = time.monotonic()
    # torch's lock, which a killed build leaves behind for ever; ours is enough.
    (OBJECTS / "lock").unlink(missing_ok=True)
    # Another process, since torch loads what it has built, from where ninja put it.
    environment = dict(os.environ)
    beside_python = str(Path(sys.executable).parent)  # ninja may be installed there only
    environment["PATH"] = os.pathsep.join((beside_python, environment["PATH"]))
    program = (
        "from torch.utils.cpp_extension import load; "
        f"load({NAME!r}, {[str(file) for file in sorted(SOURCES.glob('*.cpp'))]!r}, "
        f"extra_cflags={FLAGS!r}, build_directory={str(OBJECTS)!r}, is_python_module=False)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"the simulated device was not built:\n{run.stdout}{run.stderr}")
    library.parent.mkdir(exist_ok=True)
    half_written = library.with_suffix(".part")
    shutil.copy(OBJECTS / f"{NAME}.so", half_written)
    half_written.rename(library)
    print(f"the simulated device was built in {time.monotonic() - began:.0f} s")  # noqa: T201


if __name__ == "__main__":
    print(built())  # noqa: T201
