"""Reports: what stands on the page, that it is whole and safe, and how a real browser takes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshplan.api.planning import lock_plan, search_plan
from meshplan.api.reporting import make_report
from meshplan.cli.app import main
from meshplan.errors import PlanError, SpecError
from meshplan.pictures.base import palette
from meshplan.pictures.base.palette import PAGE, THEMES
from meshplan.pictures.main import OF_DECISIONS, WHATS
from meshplan.pictures.mesh.counted import OF_COUNT, ONLY_COUNT
from meshplan.planner.lock.lock import read, write
from meshplan.report.main import Report, ReportFacts, report_of
from meshplan.report.sections import about_choice
from meshplan.units import format_gib, format_seconds
from tests.helpers import browser
from tests.helpers.graphs import blocks
from tests.helpers.pictured import LLAMA, LONG, llama, plan_of, strange

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_hidden_layers": 3, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
OPEN = """\
version: 1
model: {config: config.json}
hardware: {nodes: 2, gpus_per_node: 2, gpu: h100-sxm-80gb, inter: 50GB/s}
mesh: auto                                  # <b>left open</b>
strategy: auto
precision: bf16-mixed
batch: {global: 8, seq_len: 512}
activation_checkpointing: auto
"""


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.is_broken = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.is_broken = tag == "wbr"

    def handle_data(self, data: str) -> None:
        if self.is_broken:  # A place where a browser may break the line.
            self.texts[-1] += data
        else:
            self.texts.append(data)
        self.is_broken = False

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "plan.yaml").write_text(OPEN)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    found = make_report(folder / "plan.yaml", why_not=["mesh.tp=2"])
    found.save(folder / "report.html")
    return found


def test_a_report_shows_every_picture_and_says_its_sentence(report):
    page = Page(report.html)
    assert set(report.shown) == set(WHATS)
    assert report.left_out == ()
    figures = page.all("figure")
    assert {each["id"] for each in figures} == {f"picture-{what}" for what in WHATS}
    svgs = page.all("svg")
    assert all(each["role"] == "img" and len(each["aria-label"]) > 40 for each in svgs)
    # Each is drawn for wide and for narrow screens, and no text repeats what it says.
    kinds = Counter(each["class"] for each in page.all("div") if "class" in each)
    assert kinds["wide"] == kinds["narrow"] == len(WHATS) + 1
    assert page.all("figcaption") == []
    assert "light" not in kinds, "a drawing is in the page twice, once for each theme"


def test_the_plan_is_beside_the_verdict(report, folder):
    top = Page(report.html[: report.html.index("<main>")])
    chosen = search_plan(folder / "plan.yaml").chosen
    for text in ("The plan", str(chosen.plan.mesh), chosen.plan.assignment.strategy.name, "rules"):
        assert text in top.texts
    assert any(text.startswith("Chosen by the planner: mesh, strategy") for text in top.texts)
    rules = [{"match": "layers.0", "place": "replicate", "why": "small"}]
    ruled = plan_of(blocks(), mesh={"dp_shard": 2}, strategy="full_shard", rules=rules)
    page = report_of(ReportFacts(name="a plan", plan=ruled)).html
    top = Page(page[: page.index("<main>")])
    assert any(text.startswith("layers.0: {") and "replicate" in text for text in top.texts)


def test_candidates_differ_in_their_texts():
    hardware = {"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}
    decision = search_plan(
        {"version": 1, "model": {"config": str(LLAMA)}, "hardware": hardware, "mesh": "auto",
         "strategy": "auto", "precision": "bf16-mixed", "batch": {"global": 64, "seq_len": 8192},
         "activation_checkpointing": "auto"}
    )  # fmt: skip
    (table,) = (each for each in about_choice(decision, ()) if "<caption>Candidates" in each)
    rows = re.findall(r"<tr><th[^>]*>(.*?)</th>", table[table.index("<tbody>") :])
    assert len(rows) > 1
    assert len(set(rows)) == len(rows)
    assert sum(row.startswith("as chosen, but ") for row in rows) == len(rows) - 1


def test_names_are_unique_and_all_that_is_referred_to_is_there(report):
    page = Page(report.html)
    names = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert [name for name, count in names.items() if count > 1] == []
    used = set(re.findall(r"url\(#([^)]+)\)", report.html))
    used |= {link.removeprefix("#") for _, attributes in page.tags
             for key, link in attributes.items() if key in ("href", "xlink:href")
             and link.startswith("#")}  # fmt: skip
    assert used
    assert used <= set(names)
    assert set(re.findall(r"var\((--c\d+)\)", report.html)) <= set(
        re.findall(r"(--c\d+):", report.html)
    )


def test_a_report_needs_nothing_but_itself(report):
    page = Page(report.html)
    assert page.all("link") == page.all("img") == page.all("iframe") == []
    links = [value for _, attributes in page.tags for key, value in attributes.items()
             if key in ("src", "href", "xlink:href")]  # fmt: skip
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "default-src 'none'" in page.all("meta")[2]["content"]
    assert len(report.html.encode()) < 2_000_000


def test_figures_of_the_page_are_those_of_the_planner(report, folder):
    decision = search_plan(folder / "plan.yaml")
    chosen = decision.chosen
    texts = Page(report.html).texts
    assert format_gib(chosen.memory.worst.band[1]) in texts
    assert f"{decision.mfu(chosen):.1%}" in texts
    for way in decision.measured:
        assert format_seconds(way.seconds) in texts
    for each in decision.rejected:
        assert each.what in texts
    # The first step of the way from the textbook, and the last.
    steps = [step.name for step in chosen.memory.reconciliation]
    assert [text for text in texts if text in (steps[0], steps[-1])][-2:] == [steps[0], steps[-1]]
    assert "mesh.tp=2" in texts
    assert any(text.startswith("the planner strategy") for text in texts)


def test_what_the_numbers_are_sorted_by_is_not_rounded(report):
    by = [float(a["data-by"]) for tag, a in Page(report.html).tags if "data-by" in a]
    assert len(by) > 30
    assert any(value > 1e6 and value % 1000 for value in by)


@pytest.mark.wide
def test_the_same_plan_has_the_same_report(report, folder):
    again = make_report(folder / "plan.yaml", why_not=["mesh.tp=2"])
    assert again.html == report.html


def test_names_are_texts_whatever_is_in_them():
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    found = report_of(ReportFacts(name="<script>alert(1)</script>", text="a: '</pre><b>'",
                            plan=plan, notes=("<i>",), left_out=(("&amp;", "'\""),)))  # fmt: skip
    page = Page(found.html)
    assert len(page.all("script")) == 1
    assert page.all("i") == []
    for text in ("<script>alert(1)</script>", "a: '</pre><b>'", "&amp;", "<i>", "слой.weight"):
        assert any(text in each for each in page.texts), text
    assert any(LONG in each for each in page.texts)


def test_colours_of_a_theme_are_variables_of_the_page(report):
    ours = {getattr(PAGE, each.name).lower() for each in fields(PAGE)} - {PAGE.name}
    source = Path(palette.__file__).read_text(encoding="utf-8").lower()
    assert all(source.count(colour) == 1 for colour in ours), "another colour equals a stand-in"
    style, _, body = report.html.partition("</style>")
    for theme in THEMES.values():
        assert all(f"--{role}: {getattr(theme, role)};" in style for role in ("paper", "forbidden"))
    assert set(re.findall(r"var\(--(\w+)\)", body)) <= {f.name for f in fields(PAGE)}
    assert "fill: var(--paper)" in body
    assert "fill: var(--ink)" in body
    # Browsers resolve variables in `style`, but not in attributes such as `fill`.
    assert '="var(' not in body
    assert not [colour for colour in ours if colour in report.html.lower()]
    # White on a dark tile stays white: it is not the paper's.
    assert "fill: #ffffff" in body


@pytest.mark.wide
def test_a_report_goes_by_the_lock_and_says_where_a_search_differs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path, lock = tmp_path / "plan.yaml", tmp_path / "plan.lock.yaml"
    path.write_text(OPEN)
    lock_plan(path, search_plan(path))
    found = Page(make_report(path).html)
    assert any("plan.lock.yaml" in text for text in found.texts)
    assert not any("a new search chooses another plan" in text for text in found.texts)
    content = {key: value for key, value in read(lock).content.items() if key != "hash"}
    assert content["chosen"]["strategy"] == "zero1"
    write(lock, {**content, "chosen": {**content["chosen"], "strategy": "zero2"}})
    found = Page(make_report(path).html)
    assert any("a new search chooses another plan" in text for text in found.texts)
    assert any("zero2; applied" in text for text in found.texts)
    # Seconds of another plan are none of this one's.
    assert "MFU" not in found.texts


def test_a_python_model_with_nothing_open_is_traced_for_its_own_mesh_only(tmp_path):
    """Each size of tp takes seconds to trace, and the search has traced the step already."""
    path, told = tmp_path / "plan.yaml", []
    path.write_text(
        "version: 1\nmodel: {entry: meshplan.runtime.demo_model:build}\nstrategy: full_shard\n"
        "hardware: {nodes: 1, gpus_per_node: 4, gpu: h100-sxm-80gb}\n"
        "batch: {micro: 2, seq_len: 32}\n"
    )
    found = make_report(path, report=told.append)
    assert found.fits
    assert not [line for line in told if "as a rank of" in line]
    assert "tracing a step of rank 0" not in told  # The search keeps its log for the timeline.
    assert "timeline" in found.shown
    assert "79.1 GiB, as torch sees it" in " ".join(found.notes)


@pytest.mark.parametrize(("gpu", "fits"), [("h100-sxm-80gb", None), ("{memory: 1MB}", False)])
def test_a_step_that_cannot_be_estimated_is_not_said_to_be_over(gpu, fits, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "version: 1\nmodel: {entry: meshplan.runtime.demo_model:build}\nstrategy: full_shard\n"
        f"hardware: {{nodes: 1, gpus_per_node: 4, gpu: {gpu}}}\nbatch: {{micro: 2}}\n"
    )
    found = make_report(path)
    assert found.fits is fits
    start = "States alone take" if fits is None else "Does not fit: states alone are OVER"
    assert found.verdict.startswith(start)


def test_without_a_model_it_tells_what_is_left_out(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nmodel: {params: 3e9}\nmesh: {dp_shard: 8}\nstrategy: full_shard\n")
    found = make_report(path)
    assert found.fits is None
    left = dict(found.left_out)
    drawn = [what for what in WHATS if what not in (*OF_DECISIONS, *OF_COUNT)]
    assert left[f"pictures: {', '.join(drawn)}"] == ONLY_COUNT
    assert found.shown == OF_COUNT
    texts = Page(found.html).texts
    assert texts[texts.index("mesh") + 1] == "dp_shard 8"
    assert "5.6 GiB" in texts
    assert "16*a/n" in texts


def test_a_question_that_cannot_be_asked_is_said_to_be_left_out(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nmodel: {params: 3e9}\nmesh: {dp_shard: 8}\n")
    found = make_report(path, ["strategy=zero2"], why_not=["mesh.tp=2"])
    assert dict(found.left_out)["why not mesh.tp=2"] == "the planner could not search this plan"
    assert "strategy=zero2" in Page(found.html).texts


def test_a_plan_that_does_not_fit_has_a_report_and_an_exit_code(folder, capsys):
    out = folder / "over.html"
    words = ["report", "-f", str(folder / "plan.yaml"), "-o", str(out), "--json",
             "--set", "mesh={dp_shard: 4}", "--set", "strategy=full_shard",
             "--set", "batch={micro: 2, seq_len: 512, accumulate: 1}",
             "--set", "activation_checkpointing=none",
             "--set", "hardware={nodes: 2, gpus_per_node: 2, memory: 1GiB}"]  # fmt: skip
    assert main(words) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["fits"] is False
    assert "OVER by" in result["verdict"]
    assert "memory" in result["pictures"]
    assert result["verdict"] in out.read_text()


@pytest.mark.wide
def test_an_open_plan_that_nothing_fits_says_what_would_help():
    hardware = {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}
    found = make_report(
        {"version": 1, "model": {"config": str(LLAMA)}, "hardware": hardware, "mesh": "auto",
         "strategy": "auto", "precision": "bf16-mixed", "batch": {"global": 8, "seq_len": 8192},
         "activation_checkpointing": "auto", "offload": "none"}
    )  # fmt: skip
    assert found.fits is False
    assert found.verdict.startswith("None of ")
    texts = Page(found.html).texts
    assert any(text.startswith("4 GPUs") for text in texts)
    assert any("none of them fits" in text for text in texts)
    assert "pareto" in found.shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "no file is named for the report"),
        (["-o", "report.pdf"], "this name does not end in .html or .htm"),
        (["-o", "nowhere/report.html"], "its folder does not exist"),
    ],
)
def test_where_a_report_cannot_go(words, error, folder, capsys):
    assert main(["report", "-f", str(folder / "plan.yaml"), *words]) == 2
    assert error in capsys.readouterr().err


def test_a_plan_with_problems_has_none(folder):
    with pytest.raises(PlanError):
        make_report(folder / "plan.yaml", ["rules=[{match: nobody, place: replicate}]"])
    with pytest.raises(SpecError):
        make_report(folder / "missing.yaml")


def test_it_needs_no_torch(folder):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from meshplan.cli.app import main\n"
        f"sys.exit(main(['report', '-f', {str(folder / 'plan.yaml')!r}, '-q', '-o', "
        f"{str(folder / 'torchless.html')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It fits")


# In a browser


needs_browser = pytest.mark.skipif(
    browser.FOUND is None, reason="no chromium is installed: apt-get install chromium"
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory):
    with browser.Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


SCROLLED = (
    "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    ".map(e => e.getAttribute('aria-label'))"
)


@needs_browser
def test_the_first_screen_has_the_verdict_and_the_plan(report, folder, shown):
    shown.open(folder / "report.html", width=1280, height=800)
    ends = [
        shown.ask(f"document.querySelector('{what}').getBoundingClientRect().bottom")
        for what in ("h1", ".figures", ".plan")
    ]
    assert max(ends) < 800
    left, right = (
        shown.ask(f"document.querySelector('{what}').getBoundingClientRect().left")
        for what in ("h1", ".plan")
    )
    assert right > left + 400
    assert shown.ask(SCROLLED) == []


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (375, False), (375, True)])
def test_a_browser_shows_it_whole_and_complains_of_nothing(report, folder, shown, width, dark):
    shown.open(folder / "report.html", width=width, dark=dark)
    assert shown.complaints == []
    assert shown.ask("document.documentElement.scrollWidth") == width
    # Every picture has a size, and what is wider than the page scrolls in its own box.
    if width == 1200:
        assert shown.ask(SCROLLED) == [], "a column is cut off"
    else:
        # Tables that scroll say so, and pictures that are drawn for a phone do not scroll.
        assert len(shown.ask(SCROLLED)) > 3
        assert shown.ask(
            "[...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility() && "
            "(e.scrollWidth > e.clientWidth + 1) == e.previousElementSibling.hidden).length"
        ) == 0  # fmt: skip
        assert shown.ask("document.querySelector('#picture-mesh svg').clientWidth") == 0
    pictures = shown.ask(
        "[...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll('svg')]"
        ".filter(s => s.clientWidth > 300 && s.clientHeight > 50).length)"
    )
    assert pictures == [1] * len(WHATS)
    beyond = "[...document.querySelectorAll('main > section > *')].filter(e => e.scrollWidth > "
    assert shown.ask(f"{beyond} e.clientWidth + 1 && !e.classList.contains('scroll') && "
                     "e.tagName != 'PRE').map(e => e.outerHTML.slice(0, 99))") == []  # fmt: skip
    paper = shown.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    # The paper of a picture is the page's, in both.
    kind = "wide" if width == 1200 else "narrow"
    drawn = f"document.querySelector('#picture-mesh .{kind} svg path')"
    assert shown.ask(f"getComputedStyle({drawn}).fill") == paper


@needs_browser
def test_long_and_strange_names_do_not_widen_the_page(folder, shown):
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    known = ReportFacts(name="n" * 200, text=f"a: {'x' * 300}", plan=plan, notes=("y" * 300,))
    report_of(known).save(folder / "strange.html")
    shown.open(folder / "strange.html", width=375)
    assert shown.ask("document.documentElement.scrollWidth") == 375
    assert shown.complaints == []


@needs_browser
def test_texts_on_a_phone_are_large_enough(report, folder, shown):
    shown.open(folder / "report.html", width=375)
    smallest = shown.ask(
        "Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.getClientRects()"
        ".length).map(t => { const m = t.getScreenCTM(); return Math.hypot(m.a, m.b) * "
        "parseFloat(getComputedStyle(t).fontSize); }))"
    )
    assert smallest > 7.5
    assert (
        shown.ask(
            "Math.min(...[...document.querySelectorAll('p, td, th, li, dd, figcaption')].map(t => "
            "parseFloat(getComputedStyle(t).fontSize)))"
        )
        >= 13
    )


@needs_browser
def test_the_keyboard_sorts_a_table(report, folder, shown):
    shown.open(folder / "report.html", width=1200)
    table = "[...document.querySelectorAll('table')].find(t => t.caption.textContent.startsWith("
    table += "'At the peak'))"
    column = f"[...{table}.tBodies[0].rows].map(r => Number(r.cells[1].dataset.by))"
    focused = f"[...{table}.tHead.rows[0].cells].findIndex(h => h.contains(document.activeElement))"
    before = shown.ask(column)
    assert before == sorted(before, reverse=True)
    for _ in range(60):
        shown.press("Tab")
        if shown.ask(focused) == 1:
            break
    assert shown.ask(focused) == 1
    sort = f"{table}.tHead.rows[0].cells[1].getAttribute('aria-sort')"
    shown.press("Enter")
    assert (shown.ask(sort), shown.ask(column)) == ("ascending", sorted(before))
    shown.press(" ")
    assert (shown.ask(sort), shown.ask(column)) == ("descending", before)
    shown.press("Enter")
    assert (shown.ask(sort), shown.ask(column)) == (None, before)
    assert shown.ask(focused) == 1
    first = f"{table}.tHead.rows[0].cells[0]"
    shown.ask(f"{first}.firstElementChild.click()")
    assert shown.ask(f"{first}.getAttribute('aria-sort')") == "ascending"
    names = shown.ask(f"[...{table}.tBodies[0].rows].map(r => r.cells[0].textContent)")
    assert names == sorted(names)
    # What has an order of its own cannot be sorted.
    assert shown.ask("[...document.querySelectorAll('table:not(.sortable) button')].length") == 0


@needs_browser
def test_it_prints(report, folder, shown):
    shown.open(folder / "report.html", width=1200, dark=True)
    printed = shown.printed()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 4
    assert shown.complaints == []


TREEMAP = "document.querySelector('#picture-treemap, body > div')"
SEEN = (
    f"[...{TREEMAP}.querySelectorAll('svg')].filter(s => s.clientWidth > 300)"
    ".map(s => s.getAttribute('aria-label'))"
)
PRESSED = f"[...{TREEMAP}.querySelectorAll('button')].map(b => b.getAttribute('aria-pressed'))"
FOCUSED = f"[...{TREEMAP}.querySelectorAll('button')].indexOf(document.activeElement)"


@needs_browser
@pytest.mark.parametrize("place", ["report", "picture"])
def test_the_keyboard_chooses_whose_bytes_the_treemap_shows(place, report, folder, shown):
    if place == "picture":
        (folder / "picture.html").write_text(llama(2).draw("treemap").page())
    shown.open(folder / f"{place}.html", width=1200)
    (local,) = shown.ask(SEEN)
    assert "on rank 0" in local
    assert shown.ask(PRESSED) == ["true", "false"]
    for _ in range(80):
        shown.press("Tab")
        if shown.ask(FOCUSED) == 1:
            break
    assert shown.ask(FOCUSED) == 1
    shown.press("Enter")
    (whole,) = shown.ask(SEEN)
    assert "in all" in whole
    assert shown.ask(PRESSED) == ["false", "true"]
    shown.ask(f"{TREEMAP}.querySelectorAll('button')[0].focus()")
    shown.press(" ")
    assert shown.ask(SEEN) == [local]
    assert shown.complaints == []
