"""Check the wording of docstrings, comments and pages.

Function docstrings begin with a verb, public functions and classes of the package have one, and banned phrases are not
used. Run by `make check`; the rules and their reasons are in CONTRIBUTING.md. `--stats` prints counts, not findings.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("src", "tests", "benchmarks", "docs", "examples", "scripts")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs", "benchmarks", "tests")
# Verbs that a function docstring may begin with. Add yours where it is missing.
_VERBS = """
abort accept accumulate acquire activate adapt add adjust admit advance align allocate allow announce answer append
apply approximate arrange ask assemble assert assign attach attend await balance batch begin benchmark bind block
bound break bring broadcast bucket build cache calculate calibrate call cancel capture cast change check choose
clamp clean clear clip close coalesce collect combine compare compile complete compress compute concatenate
configure confirm connect consume construct contain continue convert copy count cover create cut deallocate decide
declare decode decompress decrease dedupe deduplicate defer define delay delete deliver dequantize derive describe
deserialize detach detect determine disable discard disconnect dispatch display distribute divide do download drain
draw drive drop dump duplicate embed emit enable encode end enforce enqueue ensure enter enumerate escape estimate
evaluate evict exchange exclude execute exit expand expect explain export expose express extend extract fail fake
fall feed fetch fill filter find finish fit fix flatten flip flush fold follow force forget fork form format forward
free freeze fuse gather generate get give greet group grow guard guess halt hand handle hash hide hold ignore
implement import include increase infer inform inherit initialize inject insert inspect install instantiate
instruct interleave interpolate interpret interrupt intersect invoke isolate issue iterate join judge keep kill
label launch leave lend let limit link list listen load locate lock log look lower make map mark mask match measure
merge migrate mirror model modify monitor move multiply name negotiate normalize note notice notify number observe
obtain offer omit open optimize order output own pack pad parametrize parse partition pass patch pause perform
permute persist pick pin place plan play pool pop populate post predict prefer prefill prepare preserve pretend
prevent print probe proceed process produce profile prompt propagate propose prove provide prune publish pull push
put quantize queue raise rank read rebuild receive recognize recompute record recover reduce refer refine refresh
refuse register reject relax release reload remember remove rename render reopen reorder repeat replace replay
reply report represent reproduce request require rerun reserve reset reshape resize resolve respond restart restore
restrict resume retain retire retry return reuse reverse revert rewrite roll rotate round route run sample save
scale scan schedule score search see select send separate serialize serve set share shift show shuffle shut sign
signal silence simplify simulate skip sleep slice smooth sort speak specify spend split spread stack stage stamp
start state stay step stop store stream strip submit subtract sum supply suppress suspend swap switch sync
synchronize tag take tell terminate test throttle tie tile time timeout toggle tokenize touch trace track train
transfer transform translate transpose traverse treat trim truncate try tune turn undo unload unpack unpad unquote
unregister unwrap update upgrade upload use validate verify visit wait wake walk warm warn watch widen work wrap
write yield zero deploy seal summarise recompile have shrink scrape point poll narrow redirect pickle
"""
VERBS = frozenset(_VERBS.split())
# Phrases of the old dialect, and what to write instead.
BANNED = {
    r"(model|bundle)s? that writes?\b": "generative model",
    r"\bwhoever\b": "name the actor: the caller, the client, the worker thread",
    r"\bnobody\b": "name the actor",
    r"\bsomebody\b": "name the actor",
    r"\bso many\b": "a count: 'up to N', 'n'",
    r"\b(is|are) no (option|number|numbers|way)\b": "is not supported, is not finite",
    r"\bheld against\b": "compared with",
    r"\bafter a rest\b": "at boost clocks",
    r"\bover and over\b": "sustained",
    r"\bthe whole way\b": "end to end",
    r"\bin halves\b": "in fp16",
    r"\bby hand\b": "stock, plain, manually",
    r"\bany thread's\b": "Thread-safe.",
    r"\bwords a second\b": "tokens/s",
    r"\blikeliest (word|token)\b": "most likely token",
    r"\b(of|for|in) eight bits\b": "8-bit, int8, fp8",
    r"\bof its own accord\b": "automatically",
    r"\bthe road\b": "the GEMM backend",
    r"\bcrew\b": "worker pool",
    r"(?-i:\bsqueez(?:e|ed|ing)\b)": "quantize",
}
_BANNED = {re.compile(phrase, re.IGNORECASE): instead for phrase, instead in BANNED.items()}
_FIRST_WORD = re.compile(r"[`\"'(]*([A-Za-z]+(?:-[a-z]+)*)")


def main() -> int:
    """Print the findings, or with `--stats` the counts, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stats", action="store_true", help="print counts instead of findings")
    args = parser.parse_args()
    docstrings = [found for folder in CODE for file in _python_files(folder) for found in _function_docstrings(file)]
    without_verb = [found for found in docstrings if not _begins_with_verb(found[2])]
    undocumented = list(_undocumented())
    phrases = [found for folder in CODE for file in _python_files(folder) for found in _phrases_in_code(file)]
    phrases += [found for page in PAGES for file in _pages(page) for found in _phrases_in_page(file)]
    if args.stats:
        share = 1 - len(without_verb) / len(docstrings)
        print(f"{len(docstrings)} function docstrings, {share:.1%} begin with a verb")
        print(f"{len(undocumented)} public names without a docstring; {len(phrases)} banned phrases")
        return 0
    for file, line, text in without_verb:
        print(f"{file}:{line}: docstring does not begin with a verb: {text.splitlines()[0]}")
    for file, line, name in undocumented:
        print(f"{file}:{line}: {name} has no docstring")
    for file, line, text in phrases:
        print(f"{file}:{line}: {text}")
    return 1 if without_verb or undocumented or phrases else 0


def _python_files(folder: str) -> Iterator[Path]:
    yield from sorted((ROOT / folder).rglob("*.py"))


def _pages(page: str) -> Iterator[Path]:
    path = ROOT / page
    yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def _function_docstrings(file: Path) -> Iterator[tuple[Path, int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("test_"):
            text = ast.get_docstring(node)
            is_fixture = any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
            if text and not is_fixture:
                yield file.relative_to(ROOT), node.lineno, text


def _undocumented() -> Iterator[tuple[Path, int, str]]:
    """Yield public functions, classes and methods of the package that have no docstring.

    A method may go without one if it implements a method that another class documents, or that a class of another
    library declares.
    """
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in _python_files("src")}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    documented = {name for node in classes for name, method in _methods(node) if ast.get_docstring(method)}
    for file, tree in trees.items():
        for node in tree.body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if not is_public:
                continue
            if not ast.get_docstring(node):
                yield file.relative_to(ROOT), node.lineno, node.name
            if isinstance(node, ast.ClassDef) and not any(isinstance(base, ast.Attribute) for base in node.bases):
                for name, method in _methods(node):
                    if name not in documented and not name.startswith("_"):
                        yield file.relative_to(ROOT), method.lineno, f"{node.name}.{name}"


def _methods(node: ast.ClassDef) -> list[tuple[str, ast.FunctionDef]]:
    return [(item.name, item) for item in node.body if isinstance(item, ast.FunctionDef)]


def _begins_with_verb(text: str) -> bool:
    match = _FIRST_WORD.match(text)
    return match is not None and match[1].lower().partition("-")[0] in VERBS


def _phrases_in_code(file: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield banned phrases in docstrings and comments, and in the messages of src; the table above is exempt."""
    if file == Path(__file__):
        return
    with tokenize.open(file) as stream:
        source = stream.read()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and (token.string.startswith('"""') or "src" in file.parts)
        if token.type == tokenize.COMMENT or is_text:
            yield from _phrases(file, token.string, token.start[0])


def _phrases_in_page(file: Path) -> Iterator[tuple[Path, int, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        yield from _phrases(file, line, number)


def _phrases(file: Path, text: str, first_line: int) -> Iterator[tuple[Path, int, str]]:
    for phrase, instead in _BANNED.items():
        for match in phrase.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield file.relative_to(ROOT), line, f"'{match[0]}': write {instead}"


if __name__ == "__main__":
    sys.exit(main())
