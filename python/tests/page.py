"""Writes a part of a page that has several writers (docs/compatibility.md)."""

import pathlib
import re


def write_part(page: pathlib.Path, text: str) -> None:
    """Replaces the part of the page that has the same heading of level 2 as the text, and keeps the other parts.

    Raises ValueError if the page has no such part.
    """
    heading = text[: text.index("\n")]
    parts = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
    found = [i for i, part in enumerate(parts) if part.startswith(heading + "\n")]
    if len(found) != 1:
        raise ValueError(f"{page} has {len(found)} parts with the heading {heading!r}, want 1")
    parts[found[0]] = text if found[0] == len(parts) - 1 else text + "\n"
    page.write_text("".join(parts))
