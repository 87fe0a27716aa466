"""JSON lines to a file; ``log="-"`` or ``log="stdout"`` hands them to whatever collects a process's output."""

from kvcanary import CanaryConfig, watch


def serve(engine, work, path):
    with watch(engine, config=CanaryConfig(mode="log", log=path)):
        return work(engine)
