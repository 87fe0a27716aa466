"""Records that travel with KV from a prefill to a decode instance, as one more buffer in SGLang's list of transfers.

The sender packs its pages' records before SGLang sends the pages, SGLang's own transfer brings both, the receiver
unpacks them where it takes the request over. Both need the same ``key``. The adapter does this for nobody: it watches a
prefill instance without it, and refuses a decode instance.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.errors import ConfigError, LayoutError
from kvcanary.exported import Records
from kvcanary.record import key_fingerprint

if TYPE_CHECKING:
    from kvcanary.canary import Canary


class RecordBuffer:
    """Records of one group's pages, where a transfer engine can reach them.

    Args:
        canary: bound.
        group: name of the group whose pages travel.

    Attributes:
        tensor: int64 ``[pages, 1 + page_size * (2 + 2 * parts)]`` on the cache's device. Row ``p`` is that of page
            ``p``: whose records they are (0: nobody's), then the records.
    """

    def __init__(self, canary: Canary, group: str = "full") -> None:
        layout = canary.layout
        index = layout.index(group)
        self._canary = canary
        self._group = layout.groups[index]
        self._content = layout.content(index)
        self._key = key_fingerprint(canary.state.keys)
        words = self._group.page_size * (2 + 2 * canary.state.groups[index].seals.shape[0])
        self.tensor = torch.zeros(self._group.num_pages, 1 + words, dtype=torch.int64, device=layout.device)
        name = repr((group, layout.fingerprint, self._content, self._key)).encode()
        self._sign = 1 + int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")

    def join(self, kv_args: Any) -> None:
        """Add the buffer to what SGLang transfers; before its manager registers the memory.

        It is of the kind of block scales: as many items as pages of the cache, sent for all pages of a request. The
        lists must be in the same order on both sides.

        Raises:
            ConfigError: SGLang's pages are not the group's.
        """
        from sglang.srt.disaggregation.base.conn import StateType
        from sglang.srt.disaggregation.utils import append_state_component

        if int(kv_args.page_size) != self._group.page_size:
            raise ConfigError(
                f"SGLang transfers pages of {kv_args.page_size} tokens, but those of group {self._group.name!r} have "
                f"{self._group.page_size}; join the list of transfers of this group's pool"
            )
        row = self.tensor[0].nbytes
        append_state_component(kv_args, StateType.BLOCK_SCALE, [self.tensor.data_ptr()], [self.tensor.nbytes], [row])

    def pack(self, pages: Sequence[int]) -> None:
        """Write the records of pages that are about to be sent. Launches the facts up to now, on the current stream.

        Raises:
            KVCorruptionError: in ``raise`` mode, when corruption was found by now.
        """
        records = self._canary.export_records(self._group.name, list(pages))
        with self._canary.step():
            pass  # the words are there when the facts have run
        rows = torch.as_tensor(pages, device=self.tensor.device)
        self.tensor[rows, 0] = self._sign
        self.tensor[rows, 1:] = records.words.view(len(rows), -1)

    def unpack(self, pages: Sequence[int], request: str) -> bool:
        """Take over pages that have landed for a request, and queue their bytes to be looked at. Reads from the device.

        Returns:
            Whether their records came along. If not, nothing vouches for the pages: what reads them counts as not
            verified or, in pages that were allotted since, as :attr:`~kvcanary.record.Kind.UNWRITTEN`.

        Raises:
            LayoutError: records of another layout or key.
        """
        rows = torch.as_tensor(pages, device=self.tensor.device)
        signs = set(self.tensor[rows, 0].tolist())
        if signs <= {0}:
            return False
        if signs != {self._sign}:
            raise LayoutError(
                f"pages for request {request!r} came with records of another layout or key, or some without: both "
                "sides need the same model, layout and `key`, and the sender must pack all pages that it sends"
            )
        words = self.tensor[rows, 1:].reshape(len(rows) * self._group.page_size, -1)
        self.tensor[rows, 0] = 0
        layout = self._canary.layout
        records = Records(self._group.name, len(rows), words, layout.fingerprint, self._content, self._key, "")
        self._canary.import_records(self._group.name, list(pages), records, request)
        return True
