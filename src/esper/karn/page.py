"""Pages that need nothing but themselves: pictures are inside, there is no script, browsers load nothing for them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from esper.karn.console import clean_lines


def render_page(template: Path, filters: Mapping[str, Callable[..., Any]], **values: object) -> str:
    """Fills a template that extends `page.html.j2`; the filter `picture` takes SVG text or the bytes of a PNG.

    Raises:
        ImportError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise ImportError("reports need Jinja2: pip install 'esper-growth[runs]'") from None
    # Everything in a log is text of unknown origin, so everything is escaped, and nothing turns lines around.
    world = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=_printable,
    )
    world.filters |= {"picture": _picture, **filters}
    return world.get_template(template.name).render(values)


def _printable(value: object) -> object:
    """What the page is given; what it makes itself is markup already, and left alone. An event may lack an id."""
    return clean_lines(value) if type(value) is str else "" if value is None else value


def _picture(drawn: str | bytes | None) -> str | None:
    """As an image and not as markup: whatever names a chart shows, they cannot become part of the page."""
    if drawn is None:
        return None
    kind, content = ("svg+xml", drawn.encode()) if isinstance(drawn, str) else ("png", drawn)
    return f"data:image/{kind};base64,{b64encode(content).decode()}"
