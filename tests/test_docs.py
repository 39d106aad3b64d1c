"""Every message of ours can be looked up, and every link leads somewhere."""

import ast
import re
from pathlib import Path

import pytest

from megatron_tsp.refusals import REFUSED

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
#: What the code calls to make a message of its own.
ERRORS = ("TSPError", "ArmFailed", "RuntimeError", "TypeError")


def plain(text):
    return re.sub(r"\s+", " ", text.replace("`", ""))


def looked_up():
    pages = ("errors.md", "troubleshooting.md")
    return plain(" ".join((ROOT / "docs" / page).read_text() for page in pages))


def pieces(node):
    """The texts between the values of a message: of a string, an f-string, or a sum of them."""
    if isinstance(node, ast.JoinedStr):
        texts = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                texts[-1] += value.value
            else:
                texts.append("")
        return texts
    if isinstance(node, ast.BinOp):
        return pieces(node.left) + pieces(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []


def raised(source):
    """(line, [pieces]) of every error of ours that `source` makes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            if name in ERRORS:
                yield node.lineno, pieces(node.args[0])


def missing(texts, docs):
    """The clauses, of those long enough to search for, that the documentation does not have."""
    clauses = [clause for text in texts for clause in re.split(r"[:;.] ", plain(text))]
    stripped = [clause.strip(" :;,.'()") for clause in clauses]
    return [clause for clause in stripped if len(clause) >= 12 and clause not in docs]


def test_every_error_is_documented():
    docs, seen, unknown = looked_up(), 0, []
    for path in sorted((ROOT / "megatron_tsp").rglob("*.py")):
        for line, texts in raised(path.read_text()):
            seen += 1
            found = missing(texts, docs)
            unknown += [f"{path.relative_to(ROOT)}:{line}: {text}" for text in found]
    for path in sorted((ROOT / "scripts").rglob("*")):
        if path.suffix in (".sh", ".sbatch"):
            text = path.read_text().replace('" \\\n', '"')
            for words in re.findall(r'\bdie ((?:"[^"]*"\s*)+)', text):
                seen += 1
                message = " ".join(re.findall(r'"([^"]*)"', words))
                unknown += [
                    f"{path.name}: {text}"
                    for text in missing(re.split(r"\$\{?\w+\}?", message), docs)
                ]
    assert seen > 150
    assert not unknown, "not in docs/errors.md or docs/troubleshooting.md:\n" + "\n".join(unknown)


def test_every_refusal_is_documented():
    docs = looked_up()
    unknown = []
    for refusal in REFUSED:
        reason = refusal.reason.split(";")[0] if refusal.flag.startswith("--") else ""
        if refusal.flag not in docs or plain(reason) not in docs:
            unknown.append(f"{refusal.flag}: {refusal.reason}")
    assert not unknown, "not in docs/errors.md:\n" + "\n".join(unknown)


def test_an_undocumented_error_is_found():
    source = 'raise TSPError(f"--flag {a}: the moon is made " + "of cheese today")'
    [(_, texts)] = raised(source)
    assert missing(texts, looked_up()) == ["the moon is made", "of cheese today"]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{page.name}: {target}; {path.name} has {slugs}"


def named_tests(page):
    """(file, test) of each row of a table that names a test, by the page's own abbreviations."""
    files = dict(re.findall(r"`([A-Z])` =\s+(tests/\w+\.py)", page))
    words = r"tests/\w+\.py|\b[A-Z]\b(?=[ ,])|`test_\w+`"
    for row in page.splitlines():
        if row.startswith("|") and "`test_" in row:
            place = None
            for cell in re.findall(words, row.split("|")[-2]):
                if cell.startswith("`"):
                    yield place, cell.strip("`")
                else:
                    place = files.get(cell, cell)


def test_every_test_that_compatibility_names_exists():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    named = list(named_tests(page))
    gone = [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert len(named) > 40 and not gone, gone
