"""Answers a batch at once, with the checksum of each body."""

import zlib


def handle(data, context):
    if data is None:
        return None
    bodies = [row["body"] for row in data]
    return [str(zlib.crc32(body.encode() if isinstance(body, str) else body)) for body in bodies]
