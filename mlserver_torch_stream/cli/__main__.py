"""``python -m mlserver_torch_stream.cli`` runs the command if its script is not on the path."""

import sys

from mlserver_torch_stream.cli import main

if __name__ == "__main__":
    sys.exit(main())
