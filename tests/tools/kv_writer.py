"""A process that writes records under a budget until it is killed: `kv_writer ROOT MAX_BYTES FOLDER HOW`.

HOW: "on" writes record after record and counts them on standard output; "hold" writes half of one, says so
there and waits.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.names import FileName, file_name

SIZE_BYTES = 50_000


def main() -> None:
    root, max_bytes, folder, how = sys.argv[1:]
    budget = Budget(Path(root), int(max_bytes))
    for count in itertools.count():
        temp = budget.create(folder, SIZE_BYTES).temp
        if temp is None:
            continue
        os.write(temp.descriptor, b"x" * (SIZE_BYTES // 2))
        if how == "hold":
            print(temp.path, flush=True)
            time.sleep(600)
        os.write(temp.descriptor, b"x" * (SIZE_BYTES // 2))
        name = FileName(os.urandom(16), os.urandom(16), 0, 256, "slice")
        budget.publish(temp, file_name(name))
        os.close(temp.descriptor)
        print(count, flush=True)


if __name__ == "__main__":
    main()
