"""How a simulated engine keeps its cache and drives its device: the styles of real engines, in miniature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcanary.errors import ConfigError

Sliding = Literal["", "ring", "translated", "null"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way to run the engine.

    Attributes:
        name: for tables.
        pages: of each pool; page 0 is reserved.
        page_size: tokens a page.
        slot_tables: tables name slots instead of pages.
        sliding: how a second group of layers with a window keeps its tokens: not there, in a ring of slots, in slots
            of its own that a table translates to, or in pages whose forgotten ones become the null page.
        window: tokens that those layers see.
        depth: forwards that are launched before the result of an earlier one is known.
        chunk: most prompt tokens of a row in a forward.
        rows: most running requests.
        drafts: guessed tokens that a decoding row verifies in a forward.
        draft_layer: a draft model keeps a layer of its own in the same slots, and runs after the other layers.
        cache: finished pages can be found by their prefix.
        padding: dead rows that are added to each batch.
        tells_rewinds: rejected drafts are told and not left to be seen.
    """

    name: str
    pages: int = 24
    page_size: int = 4
    slot_tables: bool = False
    sliding: Sliding = ""
    window: int = 6
    depth: int = 0
    chunk: int = 7
    rows: int = 4
    drafts: int = 0
    draft_layer: bool = False
    cache: bool = True
    padding: int = 0
    tells_rewinds: bool = True

    def __post_init__(self) -> None:
        if self.drafts and self.depth:
            raise ConfigError(f"style {self.name!r}: drafts={self.drafts} need known tokens, so depth must be 0")
        if self.cache and self.sliding in ("ring", "translated"):
            raise ConfigError(f"style {self.name!r}: a {self.sliding} window cannot share prefixes; set cache=False")
        if self.draft_layer and self.sliding == "ring":
            # The oracle has one book for all layers of a slot, and a ring's are read before they are overwritten.
            raise ConfigError(f"style {self.name!r}: a ring has no layer of a draft model; set draft_layer=False")
        if self.pages * self.page_size < 4 * self.longest_write:
            raise ConfigError(f"style {self.name!r}: {self.pages} pages of {self.page_size} are too few to run at all")

    @property
    def longest_write(self) -> int:
        """Most new tokens of a row."""
        return max(self.chunk, self.drafts + 1)

    @property
    def ring(self) -> int | None:
        """Slots of a request's ring: its window, and what a forward may have to take back."""
        if self.sliding != "ring":
            return None
        return -(-(self.window + self.drafts) // self.page_size) * self.page_size

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the attention groups."""
        return ("full", "window") if self.sliding else ("full",)


STYLES = {
    style.name: style
    for style in (
        Style(name="paged"),
        Style(name="overlapped", depth=1, padding=1),
        Style(name="slots", page_size=1, pages=96, slot_tables=True, depth=1),
        Style(name="ring", sliding="ring", cache=False, depth=1),
        Style(name="translated", sliding="translated", cache=False, slot_tables=True, depth=1, padding=2),
        Style(name="null-block", sliding="null", depth=1),
        Style(name="drafts", drafts=3),
        Style(name="drafts-window", drafts=2, sliding="null", tells_rewinds=False),
        Style(name="draft-layer", drafts=2, draft_layer=True),
    )
}
"""The styles of the self-test's fault matrix."""
