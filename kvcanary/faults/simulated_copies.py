"""Faults of copies: between the pool and the host tier, between engines, and of a page to its fork."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvcanary.engines.simulated import SimulatedEngine, Style
from kvcanary.engines.simulated.memory import DRAFT
from kvcanary.engines.simulated.requests import Request
from kvcanary.faults.simulated_ops import Injector, Operation, instead, operation


def _itself(engine: SimulatedEngine) -> Any:
    return engine


def _tier(engine: SimulatedEngine) -> Any:
    return engine.tier


def _early_store(injector: Injector, original: Callable[..., None], request: Request, *to: Any) -> None:
    """The copy out does not wait for the forward that writes."""
    engine = injector.engine
    if request not in engine.running or not engine.in_flight:
        return original(request, *to)
    stale = {group: engine.memory[group].save([p for p in pages if p]) for group, pages in request.pages.items()}
    held = {group: [p for p in pages if p] for group, pages in request.pages.items()}
    original(request, *to)
    for package, copy, _ in engine.tier.leaving:
        if package.request is request and all(package.held(group) == held[group] for group in held):
            injector.done(request.name)
            copy.work = functools.partial(package.saved.update, stale)
    return None


def _early_load(injector: Injector, original: Callable[..., bool], package: Any) -> bool:
    """The copy in waits neither for the forwards that read what was there, nor for anything else."""
    engine = injector.engine
    if not engine.in_flight:
        return original(package)
    engine.settle = lambda: None  # type: ignore[method-assign]
    for pool in engine.pools.values():
        pool.free.reverse()  # what was freed last is handed out first
    try:
        begun = original(package)
    finally:
        del engine.settle
    if begun:
        injector.done(package.request.name)
        engine.tier.coming[-1][1].after = 0
        engine.device.land(engine.tier.coming[-1][1])
    return begun


def _bad_load(spoil: Callable[[Injector, Any], bool]) -> Callable[..., Any]:
    def load(injector: Injector, original: Callable[..., Any], package: Any) -> Any:
        if spoil(injector, package):
            injector.done(package.request.name)
        return original(package)

    return load


def _failed(injector: Injector, package: Any) -> bool:
    """Nothing arrives, and nobody looks at the status."""
    engine = injector.engine
    package.failed = True
    package.saved = {group: engine.memory[group].save(package.held(group)) for group in package.pages}
    return True


def _partial(injector: Injector, package: Any) -> bool:
    """The last page does not arrive."""
    pages = package.held("full")
    there = injector.engine.memory["full"].save(pages)
    for saved, old in zip(package.saved["full"], there, strict=True):
        saved[:, -1:] = old[:, -1:]
    return bool(pages)


def _no_scales(injector: Injector, package: Any) -> bool:
    """Keys and values arrive, their scales stay behind."""
    kv, _ = package.saved["full"]
    _, old = injector.engine.memory["full"].save(package.held("full"))
    package.saved["full"] = (kv, old)
    return True


def _no_draft(injector: Injector, package: Any) -> bool:
    """The model's layers arrive, the draft model's stay behind."""
    memory = injector.engine.memory["full"]
    layers = memory.layers[DRAFT]
    for saved, old in zip(package.saved["full"], memory.save(package.held("full")), strict=True):
        saved[layers] = old[layers]
    return bool(package.held("full"))


def _other_layout(_injector: Injector, package: Any) -> bool:
    """Layers are read in another order than they were written in."""
    kv, scale = package.saved["full"]
    package.saved["full"] = (kv.flip(0), scale.flip(0))
    return True


def _late_landing(injector: Injector, original: Callable[..., bool], package: Any) -> bool:
    """The request is aborted: its pages are given back, and the copy into them is not stopped."""
    engine = injector.engine
    if not original(package):
        return False
    _, copy = engine.tier.coming.pop()
    injector.done(package.request.name)
    engine.finish(package.request)
    for pool in engine.pools.values():
        pool.free.reverse()  # what was freed last is handed out first
    steps = injector.rng.randint(1, 3)

    def land(*_: Any) -> None:
        nonlocal steps
        steps -= 1
        if steps == 0:
            engine.device.launch(copy.work)

    injector.patches.after(engine, "forward", land)
    return True


def _overlapping_load(injector: Injector, original: Callable[..., Any], package: Any) -> Any:
    """Two copies into the same pages at the same time."""
    copy = original(package)
    if copy is not None and package.held("full"):
        injector.done(package.request.name)
        first, package.name = package.name, f"{package.name}-again"
        injector.engine.tier.load(package)
        package.name = first
    return copy


def _lost_copy(
    injector: Injector, original: Callable[..., None], request: Request, group: str, *pages: Sequence[int]
) -> None:
    """A page that is copied before it is written does not get its bytes."""
    (old, new), memory, kept = pages, injector.engine.memory[group], list[Any]()
    injector.engine.device.launch(lambda: kept.append(memory.save(new)))
    original(request, group, old, new)
    injector.engine.device.launch(lambda: memory.load(new, kept[0]))
    if old:
        injector.done(request.name, group=group)


def _overlaps(style: Style) -> bool:
    return style.depth > 0


def _has_draft_layer(style: Style) -> bool:
    return style.draft_layer


def _copies_pages(style: Style) -> bool:
    return style.page_size > 1 and style.sliding != "translated"


COPY_FAULTS: tuple[Operation, ...] = (
    operation(
        "early-store",
        "Pages are copied out before they are written.",
        "CONTENT",
        instead(_tier, "send", _early_store),
        within=None,
        fits=_overlaps,
        case="vllm-project/vllm#45704",
        calls="offload",
    ),
    operation(
        "early-load",
        "Pages are filled while an older forward reads them.",
        "EARLY_REUSE",
        instead(_tier, "fetch", _early_load),
        within=1,
        fits=_overlaps,
        case="vllm-project/vllm#47282",
        calls="offload",
    ),
    operation(
        "failed-load",
        "A load fails and is taken for a good one.",
        "FAILED_LOAD_USED CONTENT",
        instead(_tier, "load", _bad_load(_failed)),
        within=None,
        case="ai-dynamo/dynamo#15079",
        calls="offload",
    ),
    operation(
        "partial-load",
        "The last page of a load does not arrive.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_partial)),
        within=None,
        case="vllm-project/vllm#44238",
        calls="offload",
    ),
    operation(
        "lost-scales",
        "A load brings the values and not their scales.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_no_scales)),
        within=None,
        case="ROCm/ATOM#2146",
        calls="offload",
    ),
    operation(
        "lost-draft-layer",
        "A load brings the layers of the model and not that of the draft model.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_no_draft)),
        within=None,
        fits=_has_draft_layer,
        case="sgl-project/sglang#23346",
        calls="offload",
    ),
    operation(
        "other-layout",
        "A load puts layers in another order.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_other_layout)),
        within=None,
        case="LMCache/LMCache#4463",
        calls="offload",
    ),
    operation(
        "late-landing",
        "An abort frees pages that a copy still fills.",
        "EARLY_REUSE CONTENT",
        instead(_tier, "fetch", _late_landing),
        within=None,
        named=False,
        case="sgl-project/sglang#24527",
        calls="offload submit",
    ),
    operation(
        "overlapping-load",
        "Two copies fill the same pages at once.",
        "TRANSFER_OVERLAP",
        instead(_tier, "load", _overlapping_load),
        within=1,
        calls="offload",
    ),
    operation(
        "lost-copy",
        "A copied page does not get its bytes.",
        "CONTENT",
        instead(_itself, "copy_pages", _lost_copy),
        within=3,
        calls="fork",
        fits=_copies_pages,
    ),
)
