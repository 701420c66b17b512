"""A rank that fails to do its part: ``python -m tests.engine.unwilling RANK SIZE PORT PARENT``."""

import os
import sys

from mlserver_torch_stream.engine.child_process import die_with
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_local
from mlserver_torch_stream.errors import LoadFailed

if __name__ == "__main__":
    rank, size, port, parent = (int(argument) for argument in sys.argv[1:])
    die_with(parent)
    group = find_local(rank, size, port)
    order = group.receive()
    if os.environ["UNWILLING"] == "dies":
        os._exit(7)
    with group.all_or_none():
        raise LoadFailed(f"no room for {order[0]['chat_template'][:5]}")
