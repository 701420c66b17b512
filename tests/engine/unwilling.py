"""A rank that does not do its part: ``python -m tests.engine.unwilling RANK SIZE PORT PARENT``."""

import os
import sys

from mlserver_torch_stream.engine.tensor_parallel.parent_death import die_with
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_local
from mlserver_torch_stream.errors import LoadFailed

if __name__ == "__main__":
    rank, size, port, parent = (int(argument) for argument in sys.argv[1:])
    die_with(parent)
    group = find_local(rank, size, port)
    order = group.hear()
    if os.environ["UNWILLING"] == "dies":
        os._exit(7)
    with group.together():
        raise LoadFailed(f"no room for {order['settings']['chat_template'][:5]}")
