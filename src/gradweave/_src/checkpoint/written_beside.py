"""A checkpoint in place of another: a writer that is killed leaves the old one or the new one.

torch's writer gives files the same names each time and writes over them, while ``.metadata`` still
describes what was there. Our files have new names, and the old ones are removed once they are not
needed.
"""

import dataclasses
import os
import re
import secrets
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

# The names that torch's writer gives its files, and those that ours does.
DATA_FILE = re.compile(r"__\d+_([0-9a-f]{8}_)?\d+\.distcp")


class WrittenBeside(FileSystemWriter):
    """A writer for one ``save`` on every rank; its files have names of their own."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.fs = _MovingOnly()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the files of all ranks names with a token of this save; called on rank 0."""
        token = secrets.token_hex(4)
        return [_named(plan, token) for plan in super().prepare_global_plan(plans)]

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the metadata, then remove files that it does not name; called on rank 0."""
        super().finish(metadata, results)
        needed = {stored.relative_path for stored in metadata.storage_data.values()}
        for path in Path(self.path).iterdir():
            if DATA_FILE.fullmatch(path.name) and path.name not in needed:
                with suppress(OSError):
                    path.unlink()


class _MovingOnly(FileSystem):
    """A file system that removes nothing: a file that is moved replaces what was there."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass


def _named(plan: SavePlan, token: str) -> SavePlan:
    stored = plan.storage_data
    prefix = f"{stored.prefix}{token}_"
    return dataclasses.replace(plan, storage_data=dataclasses.replace(stored, prefix=prefix))
