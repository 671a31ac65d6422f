#!/usr/bin/env python3
"""How long `kdtree serve` takes from its start to listening, to ready and to the first streamed token: without a certificate (the gate
runs), with one, each with the binary dropped from the page cache, and once more with everything warm.

usage: scripts/coldstart.py [BINARY]     (target/release/kdtree; the embedded model, port 8123)
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time

PORT = 8123
PROMPT = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "stream": True}


def drop_from_page_cache(path):
    os.sync()
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def health():
    """The status of /health, or None while nobody listens."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None


def first_token():
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(PROMPT), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"the completion was answered {response.status}: {response.read().decode()}")
    while not response.readline().startswith(b"data: {"):
        pass
    at = time.monotonic()
    response.read()
    return at


def measure(binary, environment):
    began = time.monotonic()
    server = subprocess.Popen([binary, "serve", "--port", str(PORT)], env=environment, stderr=subprocess.DEVNULL)
    listening = ready = None
    while ready is None:
        if server.poll() is not None:
            sys.exit(f"{binary} serve ended with {server.returncode}")
        status = health()
        now = time.monotonic() - began
        listening = listening or (now if status else None)
        ready = now if status == 200 else None
        time.sleep(0.002)
    token = first_token() - began
    server.terminate()
    server.wait()
    return listening, ready, token


def main():
    binary = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "target/release/kdtree")
    if health() is not None:
        sys.exit(f"port {PORT} is in use")
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state, "HOME": state}
        for what, cold in [("gate runs, cold", True), ("certificate, cold", True), ("certificate, warm", False)]:
            if cold:
                drop_from_page_cache(binary)
            listening, ready, token = measure(binary, environment)
            print(f"{what:18} listening {listening:.3f} s, ready {ready:.3f} s, first token {token:.3f} s ({(token - ready) * 1e3:.1f} ms later)")


if __name__ == "__main__":
    main()
