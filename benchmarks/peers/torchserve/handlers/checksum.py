"""Answers a batch at once, with the checksum of each text, which is a body or the field ``text`` of a JSON object."""

import json
import zlib


def handle(data, context):
    return None if data is None else [str(zlib.crc32(text_of(row["body"]))) for row in data]


def text_of(body):
    if not isinstance(body, dict) and body[:1] in ("{", b"{"):
        body = json.loads(body)
    body = body["text"] if isinstance(body, dict) else body
    return body.encode() if isinstance(body, str) else bytes(body)
