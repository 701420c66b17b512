"""``httpx`` for servers on this machine, without TLS.

With TLS, each request would load the certificates of all authorities, which takes 25 ms of a core.
"""

from __future__ import annotations

from functools import partial

import httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
put = partial(httpx.put, verify=False)
request = partial(httpx.request, verify=False)
stream = partial(httpx.stream, verify=False)
