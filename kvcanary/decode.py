"""Words from the device become events."""

from __future__ import annotations

from collections.abc import Callable

from kvcanary.events import ScrubCompleted, SnapshotTaken, ViolationDetected
from kvcanary.layout import PoolLayout
from kvcanary.record import (
    MASK32,
    NUM_KINDS,
    OWNER_FREED,
    OWNER_HELD,
    SALTED,
    Kind,
    hex64,
    parse_owner,
    parse_writer,
)
from kvcanary.snapshot import Snapshot
from kvcanary.state import (
    KIND_COUNTS,
    NOTHING,
    OWNER_NULL,
    OWNER_TRASH,
    REPEATS,
    SCRUB_PASS_FORWARD,
    SCRUB_PASSES,
    UNVERIFIED,
    VERIFIED,
    Check,
    Reason,
    Role,
    ViolationWord,
    Word,
    group_base,
)

OWNER_STATES = {OWNER_HELD: "held", OWNER_FREED: "freed", OWNER_TRASH: "trash", OWNER_NULL: "null"}
_HAS_DIGESTS = {Kind.DIGEST, Kind.REQUEST_DIGEST, Kind.FINAL_DIGEST, Kind.POSITION, Kind.WRITE_CONFLICT}
_OF_BYTES = {Kind.CONTENT, Kind.NONFINITE, Kind.WRITE_MISSING}
_OF_PAGES = {Kind.DOUBLE_FREE, Kind.DOUBLE_ALLOC}
NameOf = Callable[[int], str]


class Decoder:
    """Turns snapshots of one run into events. ``name_of`` gives the request of a tag, "" when forgotten."""

    def __init__(self, layout: PoolLayout, name_of: NameOf) -> None:
        self._groups = [group.name for group in layout.groups]
        self._parts = [group.parts or layout.groups[layout.spaces[i]].parts for i, group in enumerate(layout.groups)]
        self._spaces = set(layout.spaces)
        self._name_of = name_of
        self._passes = [0] * len(self._groups)
        self._pass_forwards = [1] * len(self._groups)
        self._swa_seen = 0
        self._timed = 0
        self._missed = 0

    def snapshot(self, snap: Snapshot, now_ns: int, time_ns: int) -> SnapshotTaken:
        """The counters as an event."""
        words, fence = snap.words, snap.fence
        self._missed += snap.missed
        kinds = self._kinds(words)
        return SnapshotTaken(
            time_ns=time_ns,
            monotonic_ns=now_ns,
            forward=words[Word.FORWARD],
            host_forward=fence.forward,
            launches={role.name.lower(): words[Word.LAUNCHES + role] for role in Role},
            due=fence.due,
            verified=self._by_group(words, VERIFIED, Check),
            unverified=self._by_group(words, UNVERIFIED, Reason),
            violations=kinds,
            violations_dropped=sum(kinds.values()) - words[Word.STORED] + self._missed,
            violations_repeated=sum(words[group_base(group) + REPEATS] for group in range(len(self._groups))),
            new_tokens=words[Word.NEW_TOKENS],
            digest_sum=hex64(words[Word.DIGEST_SUM]),
            scrub_passes=self._spaces_word(words, SCRUB_PASSES),
            scrub_pass_forwards=self._spaces_word(words, SCRUB_PASS_FORWARD),
            abandoned=words[Word.ABANDONED],
            host_us=fence.host_ns / 1000,
            gpu_us=self._gpu_us(words),
            lag_us=(now_ns - fence.pushed_ns) / 1000,
            swa=self._swa(words),
        )

    def scrubs(self, snap: Snapshot, now_ns: int, time_ns: int) -> list[ScrubCompleted]:
        """One event for each group whose scrub wrapped since the last snapshot."""
        found: list[ScrubCompleted] = []
        for group in sorted(self._spaces):
            passes = snap.words[group_base(group) + SCRUB_PASSES]
            began = snap.words[group_base(group) + SCRUB_PASS_FORWARD]
            if passes > self._passes[group]:
                forwards = max(1, began - self._pass_forwards[group])
                found.append(
                    ScrubCompleted(
                        time_ns=time_ns,
                        monotonic_ns=now_ns,
                        forward=snap.words[Word.FORWARD],
                        group=self._groups[group],
                        passes=passes,
                        forwards=forwards,
                    )
                )
                self._passes[group], self._pass_forwards[group] = passes, began
        return found

    def violation(self, row: list[int], now_ns: int, time_ns: int) -> ViolationDetected:
        """One row of the violation ring."""
        kind = Kind(row[ViolationWord.KIND])
        group = row[ViolationWord.GROUP]
        writer = parse_writer(0 if row[ViolationWord.WRITER] == NOTHING else row[ViolationWord.WRITER])
        owner = parse_owner(0 if row[ViolationWord.OWNER] == NOTHING else row[ViolationWord.OWNER])
        tag = row[ViolationWord.TAG]
        position = row[ViolationWord.POSITION_EXPECTED]
        if kind in _OF_BYTES:
            # The scrub walks slots, not requests: the one whose token it was is named, at the token's own position.
            tag = tag if tag > 0 else writer.tag
            position = position if position >= 0 else row[ViolationWord.POSITION_FOUND]
        if kind in _OF_PAGES:
            tag = owner.tag
        tag = max(tag, 0)
        digests = kind in _HAS_DIGESTS
        part = row[ViolationWord.PART]
        return ViolationDetected(
            time_ns=time_ns,
            monotonic_ns=now_ns,
            forward=row[ViolationWord.FORWARD],
            kind=kind.name,
            role=Role(row[ViolationWord.ROLE]).name.lower(),
            group=self._groups[group],
            slot=row[ViolationWord.SLOT],
            page=row[ViolationWord.PAGE],
            row=row[ViolationWord.ROW],
            tag=tag,
            request=self._name_of(tag),
            position_expected=position,
            position_found=row[ViolationWord.POSITION_FOUND],
            token_expected=_token(row[ViolationWord.CODE_EXPECTED]),
            token_found=_token(row[ViolationWord.CODE_FOUND]),
            digest_expected=hex64(row[ViolationWord.DIGEST_EXPECTED]) if digests else "",
            digest_found=hex64(row[ViolationWord.DIGEST_FOUND]) if digests else "",
            fingerprint_expected=hex64(row[ViolationWord.FINGERPRINT_EXPECTED]) if kind == Kind.CONTENT else "",
            fingerprint_found=hex64(row[ViolationWord.FINGERPRINT_FOUND]) if kind == Kind.CONTENT else "",
            writer_tag=writer.tag,
            writer_request=self._name_of(writer.tag),
            writer_forward=writer.forward,
            owner_tag=owner.tag,
            owner_request=self._name_of(owner.tag),
            owner_state=OWNER_STATES.get(owner.state, ""),
            owner_as_of=owner.as_of,
            part=self._parts[group][part] if 0 <= part < len(self._parts[group]) else "",
            tainted=bool(row[ViolationWord.TAINTED]),
        )

    def _by_group(self, words: list[int], base: int, names: type[Check | Reason]) -> dict[str, dict[str, int]]:
        return {
            name.name.lower(): {group: words[group_base(i) + base + name] for i, group in enumerate(self._groups)}
            for name in names
        }

    def _kinds(self, words: list[int]) -> dict[str, int]:
        totals = [
            sum(words[group_base(g) + KIND_COUNTS + kind] for g in range(len(self._groups)))
            for kind in range(NUM_KINDS)
        ]
        return {Kind(kind).name: total for kind, total in enumerate(totals) if total}

    def _spaces_word(self, words: list[int], word: int) -> dict[str, int]:
        return {self._groups[g]: words[group_base(g) + word] for g in sorted(self._spaces)}

    def _gpu_us(self, words: list[int]) -> float | None:
        """The newest sample, once; None while there is no new one."""
        if words[Word.GPU_FORWARD] <= self._timed:
            return None
        self._timed = words[Word.GPU_FORWARD]
        return words[Word.GPU_NS] / 1000

    def _swa(self, words: list[int]) -> dict[str, int]:
        if words[Word.SWA_FORWARD] <= self._swa_seen:
            return {}
        self._swa_seen = words[Word.SWA_FORWARD]
        return {
            "forward_ct": words[Word.SWA_FORWARD],
            "verify_full": words[Word.SWA_FULL],
            "verify_swa": words[Word.SWA_WINDOW],
            "swa_full_idx_divergence": words[Word.SWA_DIVERGENCE],
            "swa_out_of_window_tokens": words[Word.SWA_OUT_OF_WINDOW],
        }


def _token(code: int) -> int | None:
    """The token of a code; None when the field does not apply or the code is a salted hash."""
    if code < 0:
        return None
    code &= MASK32
    return code if code < SALTED else None
