#!/usr/bin/env python3
"""Faults against the real binary, each with a counted outcome: python3 scripts/faults.py [target/debug/kdtree]

The binary must be built with `--features faults` for the last fault (the death of the engine thread); without it that one fails.
Uses Python's standard library only. Ends with a line "N passed, N failed".
"""

import http.client
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

BINARY = sys.argv[1] if len(sys.argv) > 1 else "target/debug/kdtree"
MIXED = int(os.environ.get("KDTREE_FAULTS_MIXED", "3000"))
FRANCE = {"model": "k26-mini", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
          "max_tokens": 16, "chat_template_kwargs": {"thinking": False}}
ANSWER = "The capital of France is Paris."
outcomes = []


class Server:
    """One server with limits small enough to reach."""

    def __init__(self, server="", engine="", **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory()
        config = os.path.join(self.folder.name, "kdtree.toml")
        with open(config, "w") as file:
            file.write(f"[server]\nport = {self.port}\nmax_connections = 64\nheader_timeout_s = 3\n{server}\n[engine]\ndevice = \"cpu\"\n{engine}\n")
        self.log = open(os.path.join(self.folder.name, "log"), "w+")
        self.process = subprocess.Popen([BINARY, "serve", "--config", config], stdout=self.log, stderr=self.log,
                                        env={**os.environ, "HOME": self.folder.name, "XDG_CACHE_HOME": self.folder.name, **environment})
        deadline = time.time() + 180
        while True:
            assert self.process.poll() is None and time.time() < deadline, "the server did not become ready:\n" + self.written()
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def written(self):
        self.log.flush()
        with open(self.log.name) as file:
            return file.read()

    def connect(self, timeout=120):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def get(self, path, timeout=10):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def post(self, body, path="/v1/chat/completions", timeout=120):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def open_stream(self, body, timeout=120):
        """A socket on which the request was sent and nothing was read."""
        data = json.dumps({**body, "stream": True}).encode()
        sock = self.connect(timeout)
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        return sock

    def metric(self, name):
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

    def at_rest(self, seconds=3):
        """No request, slot or connection is left; the connection that asks is the only one."""
        names = ["vllm:num_requests_running", "vllm:num_requests_waiting", "kdtree:kv_slots_held", "kdtree:connections"]
        deadline = time.time() + seconds
        while True:
            found = [self.metric(name) for name in names]
            if found == [0, 0, 0, 1]:
                return
            assert time.time() < deadline, f"at rest {dict(zip(names, found))}"
            time.sleep(0.05)

    def alive(self):
        status, text = self.post(FRANCE)
        assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == ANSWER, f"canary: {status} {text[:200]}"
        self.at_rest()


def read_all(sock):
    data = b""
    while True:
        try:
            part = sock.recv(65536)
        except (ConnectionResetError, TimeoutError):
            return data
        if not part:
            return data
        data += part


def events(data):
    """The data of the events in a chunked answer."""
    body = data.split(b"\r\n\r\n", 1)[1] if b"\r\n\r\n" in data else b""
    text = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        if not size.strip():
            break
        length = int(size, 16)
        text += rest[:length]
        body = rest[length + 2:]
        if length == 0:
            break
    return [block[6:] for block in text.decode().split("\n\n") if block.startswith("data: ")]


def said(found):
    chunks = [json.loads(event) for event in found if event != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", []))


def ends_well(found):
    return bool(found) and found[-1] == "[DONE]" and '"finish_reason":"' in "".join(found)


def ends_with_error(found):
    return bool(found) and '"error"' in found[-1]


def reset(sock):
    """Closes with a reset, as a killed client's machine does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def long(tokens, **more):
    return {**FRANCE, "max_tokens": tokens, "ignore_eos": True, **more}


def aborts(server):
    lines = server.get("/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total") and '"abort"' in line)


def outcome(name):
    def run(test):
        begun = time.time()
        try:
            detail = test() or ""
            outcomes.append(True)
            print(f"ok      {name} ({time.time() - begun:.1f} s) {detail}", flush=True)
        except Exception as error:  # every failure is counted and shown
            outcomes.append(False)
            print(f"FAILED  {name} ({time.time() - begun:.1f} s): {type(error).__name__}: {error}", flush=True)
    return run


with Server(engine="max_model_len = 8192") as server:

    @outcome("client killed in mid-stream")
    def _():
        for close in (reset, socket.socket.close):
            sock = server.open_stream(long(4000))
            while b"data: " not in sock.recv(4096):
                pass
            close(sock)
            server.at_rest()
        server.alive()

    @outcome("10,000-token prompt over the limit")
    def _():
        status, text = server.post({"model": "k26-mini", "prompt": [261] * 10_000, "max_tokens": 4}, "/v1/completions")
        error = json.loads(text)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded") and "10000" in error["message"], text
        server.alive()

    @outcome("malformed JSON")
    def _():
        bodies = [b"", b"{", b"[1,2", b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"a":"' + b"\\u0000" * 1000]
        for body in bodies:
            status, text = server.post(body)
            assert status == 400 and json.loads(text)["error"]["message"], f"{body[:20]}: {status} {text[:100]}"
        server.alive()

    @outcome("100 MB body")
    def _():
        before = server.memory()
        status, text = server.post(b" " * 100_000_000)
        assert status == 413 and json.loads(text)["error"]["code"] == "body_too_large", f"{status} {text[:100]}"
        grown = server.memory() - before
        assert grown < 32 << 20, f"memory grew by {grown >> 20} MiB"
        server.alive()

    @outcome("slow-loris headers")
    def _():
        sockets = [server.connect() for _ in range(40)]
        begun = time.time()
        for sock in sockets:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        served = 0
        while time.time() - begun < 2.5:
            for sock in sockets:
                try:
                    sock.sendall(b"a")
                except OSError:
                    pass
            served += server.get("/health")[0] == 200
            time.sleep(0.25)
        assert served >= 5, f"only {served} other requests were served meanwhile"
        for sock in sockets:
            sock.settimeout(8)
            read_all(sock)
            sock.close()
        assert time.time() - begun < 8, f"dripping clients held on for {time.time() - begun:.1f} s"
        server.alive()

    @outcome("200 connections over the limit, all silent")
    def _():
        sockets = [server.connect(10) for _ in range(264)]
        begun = time.time()
        assert server.get("/health")[0] == 200, "silent connections keep a request out"
        closed = sum(read_all(sock) == b"" for sock in sockets[:200])
        assert closed == 200 and time.time() - begun < 2, f"{closed} of the 200 oldest made room in {time.time() - begun:.1f} s"
        for sock in sockets:
            sock.close()
        server.alive()

    @outcome("200 connections over the limit, all others busy")
    def _():
        busy = [server.open_stream(long(4000)) for _ in range(64)]
        for sock in busy:
            sock.settimeout(10)
            assert sock.recv(12) == b"HTTP/1.1 200"
        told = sum(b"503" in read_all(server.connect(10)) for _ in range(200))
        for sock in busy:
            sock.close()
        server.at_rest(5)
        assert told == 200, f"{told} of 200 were told"
        server.alive()
        return f"refused: {server.metric('kdtree:connections_refused_total'):.0f}"

    @outcome("abort storm: 500 cancelled streams")
    def _():
        dice = random.Random(1)
        delays = [dice.random() * 0.3 for _ in range(500)]

        def one(delay):
            sock = server.open_stream(long(200))
            time.sleep(delay)
            (reset if delay > 0.15 else socket.socket.close)(sock)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(one, delays))
        server.at_rest(5)
        server.alive()
        return f"counted as aborts: {aborts(server):.0f}"

    @outcome("one reader at 1 byte/s beside ten fast ones")
    def _():
        alone = json.loads(server.post(long(300))[1])["choices"][0]["message"]["content"]
        fast = lambda _: events(read_all(server.open_stream(long(300))))
        with ThreadPoolExecutor(11) as pool:
            # Once with a fast reader in the slow one's place, so that what the requests need is there before memory is measured.
            big = pool.submit(lambda: read_all(server.open_stream(long(1500))))
            list(pool.map(fast, range(10)))
            big.result()
        slow = server.open_stream(long(1500))
        stop = threading.Event()

        def drip():
            while not stop.is_set():
                slow.recv(1)
                time.sleep(1)

        dripping = threading.Thread(target=drip)
        dripping.start()
        before = server.memory()
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(fast, range(10)))
        grown = server.memory() - before
        stop.set()
        dripping.join()
        slow.close()
        assert all(ends_well(answer) and said(answer) == alone for answer in answers), "a fast reader's answer is wrong"
        assert grown < 16 << 20, f"memory grew by {grown >> 20} MiB"
        server.alive()

    @outcome(f"memory over {MIXED} mixed requests")
    def _():
        def mixed(index):
            kind = index % 10
            if kind == 0:
                return server.post({**FRANCE, "temperature": -1})[0] == 400
            if kind == 1:
                sock = server.open_stream(long(100))
                time.sleep(0.02)
                reset(sock)
                return True
            if kind == 2:
                return server.post({"model": "k26-mini", "prompt": [261 + index % 50] * (1 + index % 300), "max_tokens": 3}, "/v1/completions")[0] == 200
            if kind == 3:
                wanted = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"], "additionalProperties": False}
                return server.post({**FRANCE, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": wanted}}})[0] == 200
            if kind == 4:
                return server.post({"messages": FRANCE["messages"]}, "/tokenize")[0] == 200
            if kind == 5:
                return server.get("/metrics")[0] == 200
            if kind == 6:
                return server.post({**FRANCE, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 3})[0] == 200
            return ends_well(events(read_all(server.open_stream({**FRANCE, "seed": index}))))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(mixed, range(max(MIXED // 3, 500)))), "a request went wrong while warming up"
            server.at_rest(5)
            before = server.memory()
            assert all(pool.map(mixed, range(MIXED))), "a request went wrong"
        server.at_rest(5)
        after = server.memory()
        assert after < before * 1.05, f"{before >> 20} MiB became {after >> 20} MiB"
        server.alive()
        return f"{before / 2**20:.1f} MiB -> {after / 2**20:.1f} MiB"

    @outcome("nothing panicked and no error was logged")
    def _():
        bad = [line for line in server.written().splitlines() if "panicked" in line or " ERROR " in line]
        assert not bad, bad[:3]


def under_load(server, count, tokens):
    """Streams that are surely running, and what becomes of them."""
    pool = ThreadPoolExecutor(count)
    streams = [pool.submit(lambda: events(read_all(server.open_stream(long(tokens, speculation="off"))))) for _ in range(count)]
    while server.metric("vllm:num_requests_running") < count:
        time.sleep(0.01)
    return streams


with Server(server="drain_s = 300") as server:

    @outcome("SIGTERM under load: running streams end well, exit 0")
    def _():
        streams = under_load(server, 8, 200)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert server.get("/health")[0] == 503 and server.post(FRANCE)[0] == 503, "still green after SIGTERM"
        assert all(ends_well(stream.result()) for stream in streams), "a stream was lost"
        assert server.process.wait(10) == 0, server.process.returncode


with Server(server="drain_s = 1") as server:

    @outcome("SIGTERM, drain deadline: error events, exit 0")
    def _():
        streams = under_load(server, 8, 5000)
        server.process.send_signal(signal.SIGTERM)
        begun = time.time()
        assert server.process.wait(10) == 0, server.process.returncode
        assert time.time() - begun < 4, f"it took {time.time() - begun:.1f} s"
        assert all(ends_with_error(stream.result()) for stream in streams), "a stream ended without an error event"


with Server(server="drain_s = 60") as server:

    @outcome("second SIGTERM ends at once")
    def _():
        streams = under_load(server, 4, 5000)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None, "it did not drain"
        server.process.send_signal(signal.SIGTERM)
        begun = time.time()
        assert server.process.wait(5) == 0 and time.time() - begun < 2, f"{time.time() - begun:.1f} s, {server.process.returncode}"
        assert all(ends_with_error(stream.result()) for stream in streams)


with Server(KDTREE_FAULT="engine-panic=60") as server:

    @outcome("kill of the engine thread: health 503, error events, exit not 0")
    def _():
        pool = ThreadPoolExecutor(4)
        streams = [pool.submit(lambda: events(read_all(server.open_stream(long(5000, speculation="off"))))) for _ in range(4)]
        found = [stream.result() for stream in streams]
        died = time.time()
        while server.get("/health")[0] != 503:
            assert time.time() - died < 1, "health was not red within a second"
        assert all(ends_with_error(stream) for stream in found), "a stream ended without an error event"
        assert server.process.wait(10) != 0, server.process.returncode


print(f"{sum(outcomes)} passed, {len(outcomes) - sum(outcomes)} failed")
sys.exit(not all(outcomes))
