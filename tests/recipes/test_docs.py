"""What README and docs name is there: files, modules, links, metrics, and commands with their options."""

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from samebits.recipes import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("quant", "kernels", "trainer", "rollout", "alignment_checks", "recipes", "tests", "docs", "tools")
UsageError = typer.BadParameter.__base__  # typer brings its own click
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Code in backticks, which may go on in the next line."""
    return [" ".join(s.split()) for s in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text))]


def lines(text: str) -> list[str]:
    """Lines of code blocks, continued ones joined."""
    return [line.strip() for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_files_and_modules_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for code in [*spans(text), *lines(text)]:
        for path in re.findall(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]+", code):
            assert any(ROOT.glob(path.rstrip("/.")) if "*" in path else [(ROOT / path.rstrip(".")).exists() or None]), path
            assert "*" in path or (ROOT / path.rstrip(".")).exists(), path
        for module in re.findall(r"python -m ((?:samebits|tests)[\w.]+)", code):
            assert find_spec(module) is not None, module


def commands(text: str) -> list[str]:
    """`samebits ...` as it stands there, without comments, prompts, variables of a shell and where its output goes."""
    found = [c for c in [*spans(text), *lines(text)] if re.match(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?samebits [a-z]", c)]
    found = [re.split(r"\s{2,}|\s#\s|\s[>|&]\s|;", c)[0] for c in found]
    return [re.sub(r"^(?:[A-Z_]+=\S+ )*(?:\S*/)?samebits ", "", c) for c in found]


def parse(words: list[str]) -> None:
    """Let the command line take `words`, without running anything. Raises `UsageError`."""
    command = typer.main.get_command(cli.app)
    context = command.context_class(command, info_name="samebits")
    while isinstance(command, TyperGroup):
        if not words or words[0].startswith("-"):
            return
        _, command, words = command.resolve_command(context, list(words))
        context = command.context_class(command, info_name=command.name, parent=context)
    if words:  # otherwise the command is only spoken of
        command.make_context(command.name, list(words), parent=context.parent)


def variants(command: str) -> list[list[str]]:
    """A usage line as commands: options in brackets in full, one of each `a|b`, numbers for N."""
    command = command.replace("key=value ...", "key=value").replace("...", "").replace(" | ", "|")
    command = re.sub(r"[\[\]]", "", command)
    command = re.sub(r"(?<=-)-(\w[\w-]*) \S+\|--\w[\w-]* \S+", r"-\1 1", command)  # of two options the first
    command = re.sub(r"\{([\w-]+),[^}]*\}", r"\1", command)
    words = [re.sub(r"^(\w+(?:-\w+)*)(?:\|[\w-]+)+$", r"\1", word) for word in shlex.split(command)]
    return [["1" if re.fullmatch("[A-Z]", word) else word for word in words]]  # N, S: numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_taken_by_the_command_line(page):
    refused = []
    for command in commands(page.read_text()):
        for words in variants(command):
            try:
                parse(words)
            except UsageError as error:
                refused.append(f"samebits {command}: {error.format_message()}")
    assert not refused


def test_a_command_that_is_wrong_is_found():
    assert commands("`samebits train R --chekc`") == ["train R --chekc"]
    for wrong in ("trian R", "train R --chekc", "verify server --url U", "mini-m3 OUT --minutes soon"):
        with pytest.raises(UsageError):
            parse(wrong.split())
    assert len(commands((ROOT / "README.md").read_text())) > 20


def test_metrics_of_the_readme_are_written_by_the_code():
    rows = re.findall(r"^\| (`[a-z]+/.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+/[a-z_]+)`", row)}
    source = "".join(p.read_text() for folder in ("trainer", "rollout", "recipes") for p in (ROOT / folder).glob("*.py"))
    assert len(named) > 30
    for name in named:
        prefix, leaf = name.split("/")
        assert f'"{name}"' in source or (f'"{leaf}"' in source and f"{prefix}/" in source), name


def test_every_figure_has_its_numbers():
    shown = subprocess.run(["git", "ls-files", "docs/results"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    figures = {Path(p).stem for p in shown if p.endswith(".png")}
    text = (ROOT / "docs/results/README.md").read_text() + (ROOT / "README.md").read_text()
    assert figures
    for figure in figures:
        assert f"{figure}.png" in text, figure
        made = re.search(rf"samebits report ((?:docs/results/[\w.]+\.json ?)+)[^`\n]*--png \S*{figure}\.png", text)
        sources = made[1].split() if made else [f"docs/results/{figure}.json"]
        assert all((ROOT / source).is_file() for source in sources), figure
