"""Streams a column of the tables in a tar.gz in a bucket to a server, with s3fs and tarfile.

Runs in the environment of s3fs. As in TorchServe's own example, lines are split at commas, and requests are sent in
groups of a fixed size. There are at most ``connections`` connections; 0 means no limit.
"""

import asyncio
import json
import sys
import tarfile

import aiohttp
import s3fs


async def main(endpoint, archive, url, column, field, at_once, limit, connections, output):
    storage = s3fs.S3FileSystem(key="test", secret="test", use_ssl=False, client_kwargs={"endpoint_url": endpoint})
    asked, sent = [], 0
    connector, timeout = aiohttp.TCPConnector(limit=connections), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(text):
            async with session.post(url, data=json.dumps({field: text}) if field else text.encode()) as response:
                answer = await response.text()
                assert response.status == 200, answer
                return answer

        async def send():
            answers = await asyncio.gather(*asked)
            output.writelines(f"{answer}\n" for answer in answers)
            asked.clear()

        with storage.open(archive, "rb") as body, tarfile.open(fileobj=body, mode="r|gz") as tar:
            for member in tar:
                for line in tar.extractfile(member):
                    asked.append(post(line.decode().rstrip("\n").split(",")[column - 1]))
                    sent += 1
                    if len(asked) == at_once or sent == limit:
                        await send()
                    if sent == limit:
                        return
        await send()


if __name__ == "__main__":
    endpoint, archive, url, column, field, at_once, limit, connections, path = sys.argv[1:]
    with open(path, "w") as file:
        asyncio.run(main(endpoint, archive, url, int(column), field, int(at_once), int(limit), int(connections), file))
