"""Faults in who has which page: allotment, prefixes, weights, windows, and where a request goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcanary.engines.simulated import SimulatedEngine, Style
from kvcanary.engines.simulated.pages import Pool
from kvcanary.engines.simulated.requests import Request
from kvcanary.faults.simulated_ops import Injector, Operation, instead, operation


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


def _caches(style: Style) -> bool:
    return style.cache


def _slides(style: Style) -> bool:
    return style.sliding in ("translated", "null")


_READS = "DIGEST REQUEST_DIGEST POSITION UNWRITTEN WINDOW"

PAGE_FAULTS: tuple[Operation, ...] = (
    operation(
        "double-free",
        "A page is given back twice.",
        "DOUBLE_FREE",
        instead(_full, "give_back", _double_free),
        named=False,
        case="LMCache/LMCache#5005",
    ),
    operation(
        "double-alloc",
        "A page is handed out that a request holds.",
        "DOUBLE_ALLOC UNWRITTEN POSITION WRITE_FOREIGN",
        instead(_full, "take", _double_alloc),
    ),
    operation(
        "early-free",
        "A page is given back while its request reads it.",
        "WRITE_FREED WRITE_FOREIGN " + _READS,
        instead(_itself, "step", _early_free),
        within=24,
        case="vllm-project/tpu-inference#3449",
    ),
    operation(
        "lost-evict",
        "A page is handed out again, and the index goes on naming it.",
        "FREED_WHILE_PUBLISHED",
        instead(_full, "evict", _lost_evict),
        named=False,
        fits=_caches,
        case="local-inference-lab/vllm#480",
        calls="submit weights",
    ),
    operation(
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
    operation(
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
    operation(
        "lost-identity",
        "Prefixes of other adapters or tenants are found.",
        "REQUEST_DIGEST",
        _forever(_key_without("identity"), "block_key"),
        within=None,
        named=False,
        fits=_caches,
        calls="alike",
    ),
    operation(
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
    operation(
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
    operation(
        "early-slide",
        "A window's page goes while it is read.",
        "WINDOW",
        instead(_itself, "slide", _early_slide),
        fits=_slides,
        case="vllm-project/vllm-ascend#13501",
    ),
    operation(
        "long-resume",
        "A request comes back a token longer than it was.",
        "UNWRITTEN REQUEST_DIGEST POSITION DIGEST INPUT_POSITION",
        instead(_tier, "loaded", _long_resume),
        within=1,
        calls="offload",
    ),
)
