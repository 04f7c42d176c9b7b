"""Requests that are nearly right: a case is a pure function of (seed, number)."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

from fuzz.bodies import ENDPOINTS, HOSTILE, valid_body

GETS = ["/v1/models", "/v1/models/tiny", "/health", "/ready", "/live", "/ping", "/version", "/load"]
GETS += ["/server_info", "/openapi.json", "/metrics", "/", "/v1/models/nothing"]
WATCH = "/engine/events"
"""A stream without an end: clients always hang up on it."""

JSON_TYPE = ("Content-Type", "application/json")
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST", "TRACE", "post", "FOO"]
TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
TYPES += ["application/json; charset=utf-16", "APPLICATION/JSON", "application/ld+json", "json"]
TEXTS = ["", " ", "\0", "\ud800", "\udc00x", "🌶", "e\u0301", "\u202e", "\ufeff", "\u2028", "</s>"]
TEXTS += [
    "<|im_end|>",
    "{{ 7*7 }}",
    "{% raw %}",
    "../../etc/passwd",
    "%s%n",
    "a" * 300,
    "👩‍👩‍👧" * 9,
]
TEXTS += ["x" * 70_000, "<think>", "<tool_call>", "NaN", "\r\nSet-Cookie: a=b"]
NUMBERS: list[Any] = [0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31 - 1, 2**31, 2**32, 2**53 + 1]
NUMBERS += [2**63 - 1, 2**63, -(2**63) - 1, 2**64, float("nan"), float("inf"), -float("inf")]
RAW = ["1" * 400, "-" + "9" * 5000, "1e999", "0." + "3" * 500, "01", "1.", ".5", "+1", "0x10"]
RAW += ["[" * 40 + "]" * 40, "[" * 3000 + "]" * 3000, '{"a":' * 2500 + "1" + "}" * 2500]
RAW += ["tru", "'a'", "undefined", "/* c */ 1", '"\\x41"', '"\t"', '"\\ud83d"', "1,", "{,}"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One request as it goes over the wire."""

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    how: str = "whole"
    """whole; chunked (transfer encoding); torn (the client leaves in the middle of its request);
    hang_up (it leaves in the middle of the answer)."""

    def encode(self) -> bytes:
        """The bytes of the request."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        names = {name.lower() for name, _ in self.headers}
        body = self.body
        if self.how == "chunked":
            lines.append("Transfer-Encoding: chunked")
            parts = [body[i : i + 100] for i in range(0, len(body), 100)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        elif "content-length" not in names and (body or self.method in ("POST", "PUT", "PATCH")):
            lines.append(f"Content-Length: {len(body)}")
        whole = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
        return whole[: len(whole) * 2 // 3] if self.how == "torn" else whole

    def curl(self) -> str:
        """A line for a shell; the body comes through base64 if it is no plain text."""
        words = ["curl -sS -i -X", self.method, f"'http://127.0.0.1:8000{self.path}'"]
        words += [f"-H '{name}: {value}'" for name, value in self.headers]
        if not self.body:
            return " ".join(words)
        if len(self.body) < 4000 and self.body.isascii() and b"'" not in self.body:
            return " ".join([*words, f"--data-binary '{self.body.decode()}'"])
        packed = base64.b64encode(self.body).decode()
        return f"base64 -d <<< {packed} | " + " ".join([*words, "--data-binary @-"])


def make_case(seed: int, number: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"{seed}/{number}")
    draw = rng.random()
    if draw < 0.01:
        return Case(number, "GET", WATCH, how="hang_up")
    if draw < 0.1:
        case = Case(number, rng.choice(["GET", "GET", "GET", "HEAD"]), rng.choice(GETS))
    else:
        path = rng.choices(list(ENDPOINTS), [weight for *_, weight in ENDPOINTS.values()])[0]
        case = Case(number, "POST", path, (JSON_TYPE,), _body(rng, path))
    if rng.random() < 0.12:
        case = _bent(rng, case)
    if case.how == "whole" and case.body and rng.random() < 0.06:
        case = dataclasses.replace(case, how=rng.choice(["chunked", "torn", "hang_up"]))
    return case


def _body(rng: random.Random, path: str) -> bytes:
    tree: Any = valid_body(rng, path)
    raw: dict[str, str] = {}
    for _ in range(rng.choices([0, 1, 2, 3], [35, 45, 15, 5])[0]):
        tree = _mutated(rng, tree, raw)
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    for mark, replacement in raw.items():
        text = text.replace(f'"{mark}"', replacement)
    body = text.encode("utf-8", "surrogatepass")
    return _torn_bytes(rng, body) if rng.random() < 0.1 else body


# -- values -----------------------------------------------------------------------------------


def slots(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a document but the document itself."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield tree, key
        yield from slots(value)


def _mutated(rng: random.Random, tree: Any, raw: dict[str, str]) -> Any:
    """A copy of a document with one thing changed. ``raw``: marks for what json cannot write."""
    root = [json.loads(json.dumps(tree))]
    container, key = rng.choice(list(slots(root)))
    value = container[key]
    match rng.randrange(9):
        case 0:
            container[key] = rng.choice(HOSTILE)
        case 1 if container is not root:
            del container[key]
        case 2 if isinstance(value, dict):
            value[rng.choice(["unknown", "", "__proto__", *TEXTS[:6]])] = rng.choice(HOSTILE)
        case 3 if isinstance(value, list):
            container[key] = value * rng.choice([0, 2, 40, 1500])
        case 4:
            container[key] = rng.choice([[value], {"a": value}, [value, value], str(value)])
        case 5:
            mark = f"\u0001raw{len(raw)}"
            raw[json.dumps(mark)[1:-1]] = rng.choice(RAW)
            container[key] = mark
        case 6:
            container[key] = rng.choice(NUMBERS)
        case 7:
            container[key] = rng.choice(TEXTS)
        case _:
            container[key] = _near(rng, value)
    return root[0]


def _near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        near = [value + 1, value - 1, -value, value * 1000]
        return rng.choice([*near, value + 0.5, float(value)] if abs(value) < 2**64 else near)
    if isinstance(value, str):
        at = rng.randint(0, len(value))
        return value[:at] + rng.choice(TEXTS) + value[at:]
    if isinstance(value, list):
        return [*value, rng.choice(HOSTILE)]
    return rng.choice(HOSTILE)


# -- bytes and HTTP ---------------------------------------------------------------------------


def _torn_bytes(rng: random.Random, body: bytes) -> bytes:
    at = rng.randint(0, len(body))
    return rng.choice(
        [
            body[:at],
            body[:at] + rng.randbytes(3) + body[at:],
            body[:at] + body[at + 1 :],
            b"\xef\xbb\xbf" + body,
            body + body,
            body + b" \n" * 500,
            b" " * 5000 + body,
            gzip.compress(body, 1, mtime=0),
            body.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass"),
            b"",
            b"null",
            b"[" + body + b"]",
            b'"' + body.replace(b'"', b"'") + b'"',
        ]
    )


def _bent(rng: random.Random, case: Case) -> Case:
    """The same request with another method, path, type or header."""
    replace = dataclasses.replace
    others = tuple(header for header in case.headers if header != JSON_TYPE)
    match rng.randrange(7):
        case 0:
            return replace(case, method=rng.choice(METHODS))
        case 1:
            return replace(case, path=rng.choice(_paths(rng, case.path)))
        case 2:
            return replace(case, headers=(*others, ("Content-Type", rng.choice(TYPES))))
        case 3:
            return replace(case, headers=others)
        case 4:
            header = ("Content-Encoding", rng.choice(["gzip", "br", "identity", "x"]))
            body = gzip.compress(case.body, 1, mtime=0) if rng.random() < 0.7 else case.body
            return replace(case, headers=(*case.headers, header), body=body)
        case 5:
            length = rng.choice(["-1", "x", "0", str(len(case.body) // 2), "9" * 30, "3, 3"])
            header = ("Content-Length", length)
            return replace(case, headers=(*case.headers, header), how="torn")
        case _:
            return replace(case, headers=(*case.headers, rng.choice(_HEADERS)))


_HEADERS = [
    ("X-Request-Id", "a" * 300),
    ("X-Request-Id", "same-1"),
    ("X-Request-Id", "\x80\xff"),
    ("Authorization", "Bearer " + "x" * 3000),
    ("Authorization", "Basic ??"),
    ("Expect", "100-continue"),
    ("Connection", "close"),
    ("Accept", "text/nothing"),
    ("Accept-Encoding", "br;q=nan"),
    ("Cookie", "a" * 9000),
    ("X-Big", "b" * 70_000),
    ("Origin", "http://evil.example"),
    ("Range", "bytes=0-1"),
    ("traceparent", "00-zz-1-01"),
    ("Upgrade", "websocket"),
    ("Host", "evil.example"),
]


def _paths(rng: random.Random, path: str) -> list[str]:
    return [
        path + "/",
        path.upper(),
        "/" + path,
        path + "?a=1&b=%00&a=2",
        path + "%00",
        path + "%2F..%2F..",
        "/../.." + path,
        path.replace("/v1", "/v2"),
        "/" + "a" * 9000,
        "*",
        "/%ff%fe",
        "/v1/models/" + "%F0%9F%8C%B6" * 3,
        "http://other.example" + path,
    ]
