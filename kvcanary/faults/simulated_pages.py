"""Faults in who has which page: allotment, prefixes, windows, weights, and copies between tiers and engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvcanary.engines.simulated import SimulatedEngine, Style
from kvcanary.engines.simulated.pages import Pool
from kvcanary.engines.simulated.requests import Request
from kvcanary.faults.injectors import Fault
from kvcanary.faults.simulated_ops import Injector, Operation, any_style, instead


def _full(engine: SimulatedEngine) -> Any:
    return engine.pools["full"]


def _itself(engine: SimulatedEngine) -> Any:
    return engine


def _tier(engine: SimulatedEngine) -> Any:
    return engine.tier


def _holders(injector: Injector, page: int) -> list[str]:
    return [request.name for request in injector.engine.running if page in request.pages.get("full", ())]


# --- allotment ----------------------------------------------------------------------------------------------


def _double_free(injector: Injector, original: Callable[..., None], pages: Sequence[int]) -> None:
    original(pages)
    injector.done(group="full")
    original(pages[:1])


def _double_alloc(injector: Injector, original: Callable[..., list[int]], name: str, count: int) -> list[int]:
    pool: Pool = injector.engine.pools["full"]
    held = [page for page, holders in enumerate(pool.holders) if holders and page not in pool.key_of]
    if held and count:
        page = injector.rng.choice(held)
        pool.free.insert(0, page)
        injector.done(name, *_holders(injector, page), group="full")
    return original(name, count)


def _early_free(injector: Injector, original: Callable[..., bool]) -> bool:
    engine = injector.engine
    pool: Pool = engine.pools["full"]
    held = [r for r in engine.running if r.computed and any(pool.holders[p] == 1 for p in r.pages.get("full", ()))]
    if held:
        request = injector.rng.choice(held)
        mine = [page for page in request.pages["full"] if pool.holders[page] == 1 and page not in pool.key_of]
        if mine:
            page = injector.rng.choice(mine)
            injector.done(request.name, group="full")
            pool.give_back([page])
            pool.free.insert(0, pool.free.pop())  # the next one to be handed out
    return original()


# --- prefixes -----------------------------------------------------------------------------------------------


def _lost_evict(injector: Injector, _original: Callable[..., None], _pages: Sequence[int]) -> None:
    injector.done(group="full")


def _early_publish(injector: Injector, original: Callable[..., None], request: Request) -> None:
    """The last token was sampled, but its keys and values never came to be."""
    engine, size = injector.engine, injector.engine.style.page_size
    block = (len(request.tokens) - 1) // size
    pages = request.pages.get("full", [])
    if len(request.tokens) % size == 0 and block < len(pages) and request.epoch == engine.epoch:
        key = engine.block_key(request, block)
        pool = engine.pools["full"]
        if key not in pool.by_key and pages[block] not in pool.key_of:
            injector.done(request.name, group="full")
            pool.publish(request.name, [key], [pages[block]], engine.epoch)
    original(request)


def _stale_weights(injector: Injector, original: Callable[..., None]) -> None:
    """The cache stays."""
    pools = injector.engine.pools.values()
    kept = [(pool, pool.forget_all) for pool in pools]
    for pool in pools:
        pool.forget_all = lambda: None  # type: ignore[method-assign]
    injector.done()
    try:
        original()
    finally:
        for pool, _ in kept:
            del pool.forget_all


def _key_without(part: str) -> Callable[..., int]:
    """From now on a part is left out of what pages are found by."""

    def key(injector: Injector, _original: Callable[..., int], request: Request, block: int) -> int:
        engine = injector.engine
        end = (block + 1) * engine.style.page_size
        tokens = tuple(request.tokens[:end])
        if part == "prefix":
            return hash((request.origin, tuple(request.salts.items()), tokens[-1] % 3, block))
        salts = tuple((p, s) for p, s in sorted(request.salts.items()) if p < end)
        return hash((0 if part == "identity" else request.origin, tokens, () if part == "media" else salts))

    return key


def _forever(act: Callable[..., Any], method: str) -> Callable[[Injector], None]:
    """As ``instead``, but it stays."""

    def arm(injector: Injector) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: act(injector, original, *args)

        injector.patches.wrap(injector.engine, method, make)
        injector.done()

    return arm


# --- windows and lengths ------------------------------------------------------------------------------------


def _early_slide(injector: Injector, original: Callable[..., None], request: Request, context: int) -> None:
    """The window moves by what is scheduled and not by what is settled: a page too far."""
    original(request, context)
    held, size = sum(map(bool, request.pages["window"])), injector.engine.style.page_size
    most = len(request.pages["window"]) * size + injector.engine.style.window - 1
    original(request, min(context + size, most))
    if sum(map(bool, request.pages["window"])) < held:
        injector.done(request.name, group="window")


def _long_resume(injector: Injector, original: Callable[..., None], package: Any) -> None:
    """A resumed request is taken to be a token longer than it is."""
    original(package)
    request = package.request
    if request.computed + 1 < len(request.tokens):
        injector.done(request.name)
        request.computed += 1
        request.fed = request.expected(request.computed)[: request.computed]


# --- copies -------------------------------------------------------------------------------------------------


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


def _caches(style: Style) -> bool:
    return style.cache


def _slides(style: Style) -> bool:
    return style.sliding in ("translated", "null")


def _overlaps(style: Style) -> bool:
    return style.depth > 0


def _op(
    name: str,
    description: str,
    expects: str,
    arm: Callable[[Injector], None],
    *,
    within: int | None = 0,
    named: bool = True,
    fits: Callable[[Style], bool] = any_style,
    case: str = "",
    calls: str = "",
) -> Operation:
    title = name.replace("-", " ")
    kinds = tuple(expects.split())
    fault = Fault(name=name, title=title, description=description, expects=kinds, within=within, names_request=named)
    return Operation(fault, arm, fits, case, calls)


_READS = "DIGEST REQUEST_DIGEST POSITION UNWRITTEN WINDOW"

PAGE_FAULTS: tuple[Operation, ...] = (
    _op(
        "double-free",
        "A page is given back twice.",
        "DOUBLE_FREE",
        instead(_full, "give_back", _double_free),
        named=False,
        case="LMCache/LMCache#5005",
    ),
    _op(
        "double-alloc",
        "A page is handed out that a request holds.",
        "DOUBLE_ALLOC UNWRITTEN POSITION WRITE_FOREIGN",
        instead(_full, "take", _double_alloc),
    ),
    _op(
        "early-free",
        "A page is given back while its request reads it.",
        "WRITE_FREED WRITE_FOREIGN " + _READS,
        instead(_itself, "step", _early_free),
        within=24,
        case="vllm-project/tpu-inference#3449",
    ),
    _op(
        "lost-evict",
        "A page is handed out again, and the index goes on naming it.",
        "FREED_WHILE_PUBLISHED",
        instead(_full, "evict", _lost_evict),
        named=False,
        fits=_caches,
        case="local-inference-lab/vllm#480",
        calls="submit weights",
    ),
    _op(
        "early-publish",
        "A page enters the index with a token that was never computed.",
        "UNWRITTEN PUBLISHED_UNWRITTEN REQUEST_DIGEST",
        instead(_itself, "finish", _early_publish),
        within=None,
        named=False,
        # With overlap the token is computed after all, in the forward that nobody needed.
        fits=lambda style: style.cache and not style.sliding and style.page_size > 1 and not style.depth,
        case="sgl-project/sglang#24745",
        calls="again step",
    ),
    _op(
        "stale-weights",
        "The weights change and the cache stays.",
        "STALE_EPOCH",
        instead(_itself, "update_weights", _stale_weights),
        within=None,
        named=False,
        fits=_caches,
        case="NVIDIA-NeMo/RL#4018",
        calls="weights again alike",
    ),
    _op(
        "lost-identity",
        "Prefixes of other adapters or tenants are found.",
        "REQUEST_DIGEST",
        _forever(_key_without("identity"), "block_key"),
        within=None,
        named=False,
        fits=_caches,
        calls="alike",
    ),
    _op(
        "lost-media",
        "Prefixes with other pictures are found.",
        "REQUEST_DIGEST",
        _forever(_key_without("media"), "block_key"),
        within=None,
        named=False,
        fits=_caches,
        case="LMCache/LMCache#4086",
        calls="alike",
    ),
    _op(
        "colliding-keys",
        "Prefixes of other text are found.",
        "REQUEST_DIGEST DIGEST",
        _forever(_key_without("prefix"), "block_key"),
        within=None,
        named=False,
        fits=_caches,
        case="vllm-project/vllm#12621",
        calls="submit",
    ),
    _op(
        "early-slide",
        "A window's page goes while it is read.",
        "WINDOW",
        instead(_itself, "slide", _early_slide),
        fits=_slides,
        case="vllm-project/vllm-ascend#13501",
    ),
    _op(
        "long-resume",
        "A request comes back a token longer than it was.",
        "UNWRITTEN REQUEST_DIGEST POSITION DIGEST INPUT_POSITION",
        instead(_tier, "loaded", _long_resume),
        within=1,
        calls="offload",
    ),
    _op(
        "early-store",
        "Pages are copied out before they are written.",
        "CONTENT",
        instead(_tier, "send", _early_store),
        within=None,
        fits=_overlaps,
        case="vllm-project/vllm#45704",
        calls="offload",
    ),
    _op(
        "early-load",
        "Pages are filled while an older forward reads them.",
        "EARLY_REUSE",
        instead(_tier, "fetch", _early_load),
        within=1,
        fits=_overlaps,
        case="vllm-project/vllm#47282",
        calls="offload",
    ),
    _op(
        "failed-load",
        "A load fails and is taken for a good one.",
        "FAILED_LOAD_USED CONTENT",
        instead(_tier, "load", _bad_load(_failed)),
        within=None,
        case="ai-dynamo/dynamo#15079",
        calls="offload",
    ),
    _op(
        "partial-load",
        "The last page of a load does not arrive.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_partial)),
        within=None,
        case="vllm-project/vllm#44238",
        calls="offload",
    ),
    _op(
        "lost-scales",
        "A load brings the values and not their scales.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_no_scales)),
        within=None,
        case="ROCm/ATOM#2146",
        calls="offload",
    ),
    _op(
        "other-layout",
        "A load puts layers in another order.",
        "CONTENT",
        instead(_tier, "load", _bad_load(_other_layout)),
        within=None,
        case="LMCache/LMCache#4463",
        calls="offload",
    ),
    _op(
        "late-landing",
        "An abort frees pages that a copy still fills.",
        "EARLY_REUSE CONTENT",
        instead(_tier, "fetch", _late_landing),
        within=None,
        named=False,
        case="sgl-project/sglang#24527",
        calls="offload submit",
    ),
    _op(
        "overlapping-load",
        "Two copies fill the same pages at once.",
        "TRANSFER_OVERLAP",
        instead(_tier, "load", _overlapping_load),
        within=1,
        calls="offload",
    ),
    _op(
        "lost-copy",
        "A copied page does not get its bytes.",
        "CONTENT",
        instead(_itself, "copy_pages", _lost_copy),
        within=3,
        calls="fork",
    ),
)
