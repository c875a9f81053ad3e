"""What results were measured with, as their pages say it."""

import os
import platform
import subprocess

import torch


def made_with() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    )
    return (
        f"Commit {described.stdout.strip()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} shared cores, gloo."
    )
