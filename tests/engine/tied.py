"""A child that only waits for the end of its parent: ``python -m tests.engine.tied RANK SIZE PORT PARENT``."""

import sys
import threading

from mlserver_torch_stream.engine.child_process import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[4]))
    threading.Event().wait(60)
