"""An evaluation as one HTML file in which every response can be read: filtered by right, wrong and cut off, without a network.

The filter is style alone (radio buttons and `:has`), so it works where scripts are off. Prompts, answers and responses are text of a
model: the frame escapes them, and its content security policy lets nothing of theirs run or load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samebits.alignment_checks import page
from samebits.alignment_checks.page import Column, Download, Verdict, badge, chips, counted

from .eval_log import Response
from .eval_result import Evaluation, GradedProblem, summary_rows
from .grading import Grade

TEMPLATES = Path(__file__).parent / "templates"


def write_html(path: Path, evaluation: Evaluation) -> None:
    """Write the page. Raises `PageError` with one line."""
    page.write(path, render(evaluation))


def render(evaluation: Evaluation) -> str:
    """The page of an evaluation."""
    summary, settings = evaluation.summary, evaluation.settings
    responses = [(r, g) for p in evaluation.problems for r, g in zip(p.responses, p.grades, strict=True)]
    right = sum(grade.correct for _, grade in responses)
    cut = sum(response.truncated for response, _ in responses)
    rows = summary_rows(evaluation)
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("evaluation.css", "evaluation.js"))
    return page.render(
        "evaluation.html.jinja",
        [TEMPLATES],
        own_style=style,
        own_script=script,
        title=f"{settings['task']}: {evaluation.title}",
        kind="evaluation",
        verdict=Verdict(
            "plain",
            f"mean@{evaluation.n} {summary.mean.value:.1%}",
            f"{right:,} of {counted(len(responses), 'response')} to {counted(summary.problems, 'problem')} right, {cut:,} cut off",
        ),
        facts={"task": settings["task"], "model": evaluation.title},
        download=Download.of("evaluation.json", evaluation.as_dict()),
        figure_columns=[Column("what"), Column("value", number=True)],
        figures=rows,
        filters=[
            ("all", "all", len(responses)),
            ("right", "right", right),
            ("wrong", "wrong", len(responses) - right),
            ("cut", "cut off", cut),
        ],
        problems=[_problem(graded) for graded in evaluation.problems],
        settings={key: page.clip(value) if value is not None else "–" for key, value in settings.items()},
    )


def _problem(graded: GradedProblem) -> dict[str, Any]:
    return {
        "id": graded.problem.id,
        "prompt": graded.problem.prompt,
        "gold": graded.problem.gold,
        "right": graded.right,
        "responses": [_response(r, g) for r, g in zip(graded.responses, graded.grades, strict=True)],
    }


def _response(response: Response, grade: Grade) -> dict[str, Any]:
    shown = {
        "answer": "none" if grade.answer is None else grade.answer,
        "tokens": "unknown" if response.tokens is None else response.tokens,
    }
    return {
        "sample": response.sample,
        "tone": "right" if grade.correct else "wrong",
        "cut": response.truncated,
        "badge": badge("good", "right") if grade.correct else badge("bad", "cut off" if response.truncated else "wrong"),
        "chips": chips(shown),
        "text": response.text,
    }
