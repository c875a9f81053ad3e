"""What stands in a page itself, so that nothing has to be loaded: our own styles and scripts.

Everything else in it is text from outside, which is shown as text.
"""

import base64
import hashlib
import json
from importlib.resources import files as package_files
from typing import Any

import jinja2
from markupsafe import Markup

from gradweave._src.vocabulary import all_printable, printable


def asset(name: str) -> str:
    return (package_files(__package__) / "assets" / name).read_text("utf-8")


def policy_hash(text: str) -> str:
    """Return how a content security policy names a text that may stand in the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def template(name: str) -> jinja2.Template:
    """Return a template of ours, which escapes all that it is given and makes it safe to see."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown
    )
    return environment.from_string(asset(name))


def _shown(value: object) -> object:
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value)


def embedded(value: Any) -> Markup:
    """Return JSON in which nothing can end the element it stands in."""
    text = json.dumps(all_printable(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 escaped above
