"""MkDocs hooks: publish pages and files that lie outside `docs/`, under the links that also work on GitHub."""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security_policy.md",
}
_SOURCES = {uri: ROOT / name for name, uri in ROOT_PAGES.items()}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_PICTURE = re.compile(r'<picture>.*?srcset="docs/([^"]+)".*?alt="([^"]+)" src="docs/([^"]+)".*?</picture>', re.DOTALL)
_BADGES = re.compile(r"^!\[.*img\.shields\.io.*\n", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace every directory in the navigation by its pages, so that a new decision page needs no entry."""
    for entry in config.nav or []:
        for title, target in entry.items():
            if isinstance(target, str) and target.endswith("/"):
                entry[title] = [f"{target}index.md", *(f"{target}{page.name}" for page in _pages(DOCS / target))]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, an index of the decisions, and all files that pages link to."""
    for uri, source in _SOURCES.items():
        files.append(File.generated(config, uri, abs_src_path=str(source)))
    files.append(File.generated(config, "decisions/index.md", content=_index(DOCS / "decisions")))
    for source in [file for file in files.documentation_pages() if file.abs_src_path]:
        path = Path(str(source.abs_src_path))
        for link in _LINK.findall(path.read_text(encoding="utf-8")):
            target = (path.parent / link).resolve()
            uri = _site_uri(target)
            if uri is not None and target.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Rewrite links between files of the repository to links between files of the site."""
    uri = page.file.src_uri
    source = _SOURCES.get(uri, DOCS / uri)

    def rewrite(match: re.Match[str]) -> str:
        target = _site_uri((source.parent / match[1]).resolve())
        return match[1] if target is None else relpath(target, PurePosixPath(uri).parent)

    # The theme's own switch chooses between the two versions of a picture; badges would need the network.
    markdown = _PICTURE.sub(r"![\2](docs/\3#only-light)\n![\2](docs/\1#only-dark)", _BADGES.sub("", markdown))
    return _LINK.sub(rewrite, markdown)


def _site_uri(path: Path) -> str | None:
    """Return where a file of the repository is found on the site; None outside the repository."""
    if not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
    return f"{inside}/index.md" if path.is_dir() else ROOT_PAGES.get(inside, inside)


def _index(directory: Path) -> str:
    entries = [f"- [{_title(page)}]({page.name})" for page in _pages(directory)]
    return "\n".join([f"# {directory.name.capitalize()}", "", *entries]) + "\n"


def _pages(directory: Path) -> list[Path]:
    return sorted(page for page in directory.glob("*.md") if page.name != "index.md")


def _title(page: Path) -> str:
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else page.stem
