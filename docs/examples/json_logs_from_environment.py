"""The same without a setting in the code: ``KVCANARY_MODE=log KVCANARY_LOG=kvcanary.jsonl python serve.py``."""

import kvcanary


def serve(engine, work):
    with kvcanary.watch(engine):
        return work(engine)
