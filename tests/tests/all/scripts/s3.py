"""A server on loopback that knows as much of S3 as boto3 needs to read, write and delete objects.

It prints its port, keeps objects in memory, and ends when its standard input does.
"""
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

objects = {}


def dechunk(body):
    """What is behind the content encoding aws-chunked."""
    plain = b""
    while True:
        head, body = body.split(b"\r\n", 1)
        length = int(head.split(b";")[0], 16)
        if length == 0:
            return plain
        plain, body = plain + body[:length], body[length + 2:]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def name(self):
        return unquote(urlsplit(self.path).path)

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self.answer(status, body.encode(), Content_Type="application/xml")

    def do_HEAD(self):
        body = objects.get(self.name())
        if body is None:
            return self.answer(404)
        self.answer(200, Content_Length=str(len(body)))

    def do_GET(self):
        if "AWS4-HMAC-SHA256 Credential=key/" not in self.headers.get("Authorization", ""):
            return self.refuse(403, "AccessDenied")
        body = objects.get(self.name())
        if body is None:
            return self.refuse(404, "NoSuchKey")
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        part = body[int(first):int(last) + 1]
        self.answer(206, part, Content_Range=f"bytes {first}-{last}/{len(body)}")

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = dechunk(body)
        objects[self.name()] = body
        self.answer(200, ETag='"0"')


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
if len(sys.argv) > 1:
    with open(sys.argv[1], "rb") as file:
        objects["/bucket/disk"] = file.read()
print(server.server_address[1], flush=True)
sys.stdin.read()
