"""``httpx`` for servers on this machine, without TLS.

With TLS, each request would load the certificates of all authorities, which takes 25 ms of a core. Unless a call says
otherwise, a busy server has a minute to answer instead of the five seconds of ``httpx``.
"""

from __future__ import annotations

from functools import partial

import httpx

get = partial(httpx.get, verify=False, timeout=60)
post = partial(httpx.post, verify=False, timeout=60)
put = partial(httpx.put, verify=False, timeout=60)
request = partial(httpx.request, verify=False, timeout=60)
stream = partial(httpx.stream, verify=False, timeout=60)
