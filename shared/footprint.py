"""What a worker's memory really is, as the operating system counts it.

Linux: PSS, which shares shared pages out instead of counting them twice. macOS: phys_footprint, which RSS
under-reports by everything Metal holds. Reading costs milliseconds for a large process: never on the loop.
"""

from __future__ import annotations

import ctypes
import sys

# struct rusage_info_v2 of <libproc.h>: a 16-byte uuid, then uint64 fields; ri_phys_footprint is the eighth.
_RUSAGE_INFO_V2 = 2
_UUID_BYTES = 16
_FOOTPRINT_FIELD = 7
_RUSAGE_BYTES = 512  # more than any version of the struct


def footprint_bytes(pid: int) -> int:
    """Bytes of memory the process holds; 0 when it is gone or can't be asked."""
    if sys.platform == "darwin":
        return _phys_footprint(pid)
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _phys_footprint(pid: int) -> int:
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    try:
        libc = ctypes.CDLL(None)
        if libc.proc_pid_rusage(pid, _RUSAGE_INFO_V2, buffer) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    start = _UUID_BYTES + 8 * _FOOTPRINT_FIELD
    return int.from_bytes(buffer.raw[start : start + 8], sys.byteorder)
