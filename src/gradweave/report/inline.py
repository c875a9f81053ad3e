"""What stands in a page itself, so that nothing has to be loaded: our own styles and scripts."""

import base64
import hashlib
from importlib.resources import files as package_files


def asset(name: str) -> str:
    return (package_files(__package__) / "assets" / name).read_text("utf-8")


def policy_hash(text: str) -> str:
    """How a content security policy names a text that may stand in the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
