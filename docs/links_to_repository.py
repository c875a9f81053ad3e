"""A hook of mkdocs: links that leave docs/ lead to the repository, which the site does not hold."""

import re
from typing import Any

LEAVES_DOCS = re.compile(r"\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page with such links made absolute."""
    return LEAVES_DOCS.sub(rf"]({config.repo_url.rstrip('/')}/blob/HEAD/\1)", markdown)
