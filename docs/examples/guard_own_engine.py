"""Watch the simulated engine through the small adapter: clean traffic first, then one fault at a time."""

from small_adapter import SmallAdapter

from kvcanary import Canary, CanaryConfig
from kvcanary.engines.simulated import SimulatedEngine
from kvcanary.events import IncidentOpened, KernelStalled, SnapshotTaken
from kvcanary.testing import EventRecorder, assert_no_violations, assert_violation

CHECKS = ["links", "row_ends", "writes", "sealed", "content"]


def serve(style, spoil=None, adapter=None):
    """Prefixes, forks, preemption, cancellation, new weights; ``spoil`` breaks something and says whose it was."""
    events, victim = EventRecorder(), ""
    canary = Canary(CanaryConfig(mode="log", health_every=20, health_warmup=0), observers=[events]).start()
    engine = SimulatedEngine(style, seed=1)
    rng = engine.rng
    undo = (adapter or SmallAdapter()).attach(engine, canary)
    heads = [engine.prompt(12) for _ in range(3)]
    for step in range(80):
        if step % 2 == 0:
            engine.submit(rng.choice(heads) + engine.prompt(rng.randint(1, 12)), rng.randint(4, 16))
        engine.step()
        if step == 30:
            engine.update_weights()
        if step % 12 == 5 and engine.running:
            rng.choice([engine.fork, engine.preempt, engine.abort])(engine.running[-1])
        if step == 40 and spoil is not None:
            engine.settle()
            victim = spoil(engine, canary)
    while engine.step():
        pass
    undo()
    canary.stop()
    return events, victim


def flip_a_bit(engine, _):
    """As a stray write or bad memory does."""
    victim = engine.running[0]
    engine.memory["full"].kv[1, victim.pages["full"][0], 2] ^= 1 << 20
    return victim.name


def swap_two_pages(engine, _):
    """Two requests read each other's tokens, at the right positions."""
    first, second = engine.running[0].pages["full"], engine.running[1].pages["full"]
    first[1], second[1] = second[1], first[1]
    return engine.running[0].name


def free_too_early(engine, _):
    """A page is given back that its request goes on writing."""
    victim = engine.running[0]
    engine.pools["full"].give_back(victim.pages["full"][-1:])
    return victim.name


def lose_a_kernel(_, canary):
    """As when a graph is captured without the check."""
    canary.suppress("check")
    return ""


FAULTS = {"CONTENT": flip_a_bit, "DIGEST": swap_two_pages, "PUBLISHED_UNOWNED": free_too_early}

if __name__ == "__main__":
    for style in ("paged", "overlapped", "slots", "drafts"):
        events, _ = serve(style)
        assert_no_violations(events, checks=CHECKS)
        print(f"{style}: silent,", events.of(SnapshotTaken)[-1].verified)
    for kind, spoil in FAULTS.items():
        events, victim = serve("paged", spoil)
        assert_violation(events, kind=kind, request=victim)
        print(f"{spoil.__name__}: {events.of(IncidentOpened)[0].headline}")
    events, _ = serve("paged", lose_a_kernel)
    print(f"lose_a_kernel: {events.wait_for(KernelStalled).detail}")
