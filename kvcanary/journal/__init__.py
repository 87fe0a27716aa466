"""The journal: one SQLite file a run, from which a run can be looked at, and replayed, after the process is gone.

:mod:`~kvcanary.journal.recorder` turns events into frames on the drain's thread, :mod:`~kvcanary.journal.sink` hands
them to a thread of its own, which writes through :mod:`~kvcanary.journal.store`. :mod:`~kvcanary.journal.reader` reads
what they wrote; :mod:`~kvcanary.journal.gate` holds an error back until it is on disk.
"""
