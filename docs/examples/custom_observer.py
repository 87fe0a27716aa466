"""Tell somebody when a KV cache goes wrong, or when nobody looks any more."""

import kvcanary


@kvcanary.observer
def tell_me(event: kvcanary.IncidentOpened | kvcanary.KernelStalled) -> None:
    what = event.headline if isinstance(event, kvcanary.IncidentOpened) else event.detail
    print(f"forward {event.forward}: {what}")


def serve(engine, work):
    with kvcanary.watch(engine, mode="log", observers=[tell_me]):
        return work(engine)
