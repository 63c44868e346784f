"""Names of other alphabets: letters where a font has them, numbers where none does."""

from __future__ import annotations

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.text import Text

from meshplan.pictures.base import fonts
from meshplan.pictures.base import page as sheet
from meshplan.pictures.base.fonts import drawable, families_of, family_of
from meshplan.pictures.base.page import width_of
from meshplan.pictures.main import draw
from tests.helpers.pictured import plan_of, strange

LAYER = "层"


def forget():
    for cached in (fonts.family_of, fonts._font, fonts._others, sheet._advance):
        cached.cache_clear()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A machine with one more font, which has one more letter: a square."""
    pen = TTGlyphPen(None)
    for move, at in (("moveTo", (100, 0)), ("lineTo", (100, 800)), ("lineTo", (900, 800)),
                     ("lineTo", (900, 0))):  # fmt: skip
        getattr(pen, move)(at)
    pen.closePath()
    square = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "layer"])
    builder.setupCharacterMap({ord(LAYER): "layer"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "layer": square})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "layer": (1000, 100)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Square Script", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    path = tmp_path / "square.ttf"
    builder.save(path)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", list(font_manager.fontManager.ttflist))
    font_manager.fontManager.addfont(path)
    forget()
    yield "Square Script"
    forget()


def drawn(picture):
    """The texts as they are in the moment of saving."""
    found = []
    save = type(picture.figure).savefig

    def look(figure, *args, **kwargs):
        found.extend((t.get_text(), t.get_fontfamily()) for t in figure.findobj(Text))
        return save(figure, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(picture.figure), "savefig", look)
        picture._repr_png_()
    return found


def test_a_letter_is_of_a_font_that_has_it(script):
    assert family_of(LAYER) == script
    assert families_of(f"model.{LAYER}") == ["DejaVu Sans", script]
    assert drawable(f"{LAYER}.weight") == f"{LAYER}.weight"
    assert width_of(LAYER, 10.0) == pytest.approx(10.0 / 72 * sheet._HINTED)
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    for what in ("graph", "treemap", "layout"):
        options = {"name": LAYER} if what == "layout" else {}
        texts = drawn(draw(plan, what, **options))
        with_it = [(text, families) for text, families in texts if LAYER in text]
        assert with_it, what
        assert all(script in families for _, families in with_it)
        assert not any("\\u" in text for text, _ in texts)


def test_what_no_font_has_is_a_number_and_comes_back_after(recwarn):
    forget()
    nobody = "\U000e0041"
    assert family_of(nobody) is None
    assert drawable(f"a{nobody}") == "a\\ue0041"
    if family_of(LAYER) is not None:
        pytest.skip("this machine has the letter")
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    picture = draw(plan, "graph")
    assert any("\\u5c42" in text for text, _ in drawn(picture))
    assert any(LAYER in t.get_text() for t in picture.figure.findobj(Text))
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_svg_keeps_the_letters(script):
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    text = draw(plan, "graph").svg()
    assert LAYER in text
    assert "слой" in text
    assert "\\u" not in text


def test_fonts_that_draw_boxes_for_everything_are_not_asked():
    assert not any(name.startswith("Last Resort") for name, _ in fonts._others())
