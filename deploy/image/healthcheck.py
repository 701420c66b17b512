"""Ends with status 0 if the server of this container is ready, else with 1. Knows nothing of models.

It finds the server by its variables. If the server requires certificates from its clients, the check fails.
"""

import os
import ssl
import sys
import urllib.request


def is_ready() -> bool:
    encrypted = bool(os.environ.get("MLSERVER_TORCH_STREAM_TLS_CERT_FILE"))
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate names the host that clients use
    context.verify_mode = ssl.CERT_NONE
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    port = os.environ.get("MLSERVER_HTTP_PORT", "8080")
    url = f"{'https' if encrypted else 'http'}://127.0.0.1:{port}/v2/health/ready"
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=4) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(0 if is_ready() else 1)
