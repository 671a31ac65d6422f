#!/usr/bin/env python3
"""Times FlashInfer MLA (FA2, FA3) and SGLang's Triton extend kernel on the grid of `kdtree bench kernel`.

Peers that are not installed are skipped and named. See README.md beside this file.
"""
import argparse
import importlib
import json
import statistics
import sys
import types

import torch

HEADS, LATENT, ROPE = 8, 512, 64
SCALE = 1.0 / 192**0.5
ROTATE = 512 << 20


def cells(args):
    for q in args.q:
        for b in args.batch:
            for l in args.prefix:
                if b * l <= 32 * 65536:
                    yield q, b, l


class Inputs:
    """One set of KV rows, slots, queries and outputs on the card, the draft rows' keys behind the prefix."""

    def __init__(self, cache, permutation, start, q, b, l):
        n = l + q
        total = b * n
        slots = permutation[(torch.arange(total, device="cuda") + start) % permutation.numel()]
        self.cache, self.slots = cache, slots.to(torch.int32)
        self.kv_indptr = torch.arange(b + 1, device="cuda", dtype=torch.int32) * n
        self.qo_indptr = torch.arange(b + 1, device="cuda", dtype=torch.int32) * q
        self.kv_len = torch.full((b,), n, device="cuda", dtype=torch.int32)
        self.q = torch.randn(b * q, HEADS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        self.shape = (q, b, l)


def flashinfer_peer(backend):
    mla = importlib.import_module("flashinfer.mla")

    def prepare(x):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        wrapper.plan(x.qo_indptr, x.kv_indptr, x.slots, x.kv_len, HEADS, LATENT, ROPE, 1, False, SCALE, torch.bfloat16, torch.bfloat16)
        q_nope, q_pe = x.q[..., :LATENT].contiguous(), x.q[..., LATENT:].contiguous()
        ckv, kpe = x.cache[:, None, :LATENT], x.cache[:, None, LATENT:]
        return lambda: wrapper.run(q_nope, q_pe, ckv, kpe)

    return prepare


def extend_peer():
    # The kernel file needs two modules of SGLang that pull in the whole server; stand-ins with what it asks for are enough.
    utils = types.ModuleType("sglang.srt.utils")
    utils.is_cuda, utils.is_hip = (lambda: True), (lambda: False)
    utils.__getattr__ = lambda name: (lambda *a, **k: False)
    environ = types.ModuleType("sglang.srt.environ")
    environ.envs = types.SimpleNamespace()
    for name, module in (("sglang.srt.utils", utils), ("sglang.srt.environ", environ)):
        sys.modules.setdefault(name, module)
    extend = importlib.import_module("sglang.kernels.ops.attention.extend_attention")

    def prepare(x):
        q, b, l = x.shape
        rows = x.slots.view(b, l + q)
        draft = x.cache[rows[:, l:].reshape(-1).long()][:, None, :]
        out = torch.empty(b * q, HEADS, LATENT, device="cuda", dtype=torch.bfloat16)
        kv_indptr = torch.arange(b + 1, device="cuda", dtype=torch.int64) * l
        kv_indices = rows[:, :l].reshape(-1).long()
        tree = torch.tril(torch.ones(q, q, dtype=torch.bool, device="cuda"))
        mask = torch.cat([torch.ones(q, l, dtype=torch.bool, device="cuda"), tree], 1).flatten().repeat(b)
        mask_indptr = torch.arange(b + 1, device="cuda", dtype=torch.int64) * (q * (l + q))
        buffer = x.cache[:, None, :]
        v = draft[..., :LATENT].contiguous()
        return lambda: extend.extend_attention_fwd(
            x.q, draft, v, out, buffer, buffer[..., :LATENT], x.qo_indptr.long(), kv_indptr, kv_indices, mask, True, mask_indptr, q,
            1.0, 1.0, SCALE)

    return prepare


def measure(prepare, sets):
    calls = [prepare(x) for x in sets]
    for call in calls:
        call()
    torch.cuda.synchronize()
    launches = max(len(calls), 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    times = []
    for _ in range(21):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--q", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefix", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--ours", help="JSON of `kdtree bench kernel`, shown beside")
    parser.add_argument("--json", help="write the times")
    args = parser.parse_args()

    peers = {}
    for name, make in (("fa3", lambda: flashinfer_peer("fa3")), ("fa2", lambda: flashinfer_peer("fa2")), ("extend", extend_peer)):
        try:
            peers[name] = make()
        except ImportError as error:
            print(f"{name} left out: {error}", file=sys.stderr)
    if torch.cuda.get_device_capability() != (9, 0):
        peers.pop("fa3", None)

    ours = {}
    if args.ours:
        with open(args.ours) as file:
            for row in json.load(file)["rows"]:
                if (row["kernel"], row["numerics"], row["slots"]) == ("tree", "fast", "random"):
                    ours[row["q"], row["b"], row["l"]] = row["us"]

    largest = max(b * (l + q) for q, b, l in cells(args))
    slots = largest + ROTATE // 1152
    cache = torch.randn(slots, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    permutation = torch.randperm(slots, device="cuda")
    rows = []
    print("q B L " + " ".join([*peers, "ours"]))
    for q, b, l in cells(args):
        count = max(1, min(32, ROTATE // (b * (l + q) * 1152)))
        sets = [Inputs(cache, permutation, i * b * (l + q), q, b, l) for i in range(count)]
        row = {"q": q, "b": b, "l": l}
        for name, prepare in peers.items():
            try:
                row[name] = measure(prepare, sets)
            except Exception as error:  # a peer that refuses a shape must not end the run
                print(f"{name} q {q} B {b} L {l}: {error}", file=sys.stderr)
        rows.append(row)
        shown = [f"{row[name]:.1f}" if name in row else "-" for name in peers]
        print(q, b, l, *shown, f"{ours[q, b, l]:.1f}" if (q, b, l) in ours else "-", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
