"""The pages: every link leads somewhere, and every kept figure has a page or a test."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = "docs/benchmarks/"
INDEX = ROOT / FIGURES / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def tracked(*patterns: str) -> list[Path]:
    """The tracked files of these patterns that are still there."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """The names that a Markdown page's headings have in links, as GitHub makes them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    names = set()
    for heading in headings:
        letters = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading).lower())
        names.add(letters.replace(" ", "-"))
    return names


def broken_links(page: Path) -> list[str]:
    """The links of a page to files or headings that do not exist."""
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page}: {link}")
    return broken


def test_every_link_of_every_page_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in tracked("*.md"):
        broken += broken_links(page)
    assert broken == []


def test_a_planted_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](#heads-and-encoders) [b](#gone) [c](page.md) [d](gone.md) [e](page.md#gone)"
    page.write_text(f"## Heads and encoders\n\n{links}\n")
    assert broken_links(page) == [
        f"{page}: {link}" for link in ("#gone", "gone.md", "page.md#gone")
    ]


def test_every_kept_figure_is_named_by_a_page_or_a_test() -> None:
    texts = [path.read_text(encoding="utf-8") for path in tracked("*.md", "*.py") if path != INDEX]
    nameless = []
    for figure in tracked(FIGURES):
        names = (figure.name, f'"{figure.stem}"')
        if figure != INDEX and not any(name in text for name in names for text in texts):
            nameless.append(figure.name)
    assert nameless == [], "link it from a page, or delete it: git keeps it"
