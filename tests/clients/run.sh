#!/usr/bin/env bash
# Clients that are not ours against the real binary: tests/clients/run.sh [target/debug/kdtree]
# Versions are pinned. Ends with "N passed, N failed". CLIENTS_CACHE keeps what was downloaded (default target/clients).
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/debug/kdtree}
cache=${CLIENTS_CACHE:-target/clients}
vllm=0.33.0
mkdir -p "$cache"

if ! cmp -s tests/clients/requirements.txt "$cache/installed.txt"; then
    rm -rf "$cache/venv"
    python3 -m venv "$cache/venv"
    "$cache/venv/bin/pip" install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
    cp tests/clients/requirements.txt "$cache/installed.txt"
fi
python=$cache/venv/bin/python
# No byte code among the sources.
export PYTHONDONTWRITEBYTECODE=1

# The load client is one Rust binary inside vLLM's wheel; nothing of the wheel's Python is installed.
if [ ! -x "$cache/vllm-rs-$vllm" ]; then
    rm -rf "$cache/wheel"
    "$cache/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps -d "$cache/wheel" "vllm==$vllm"
    "$python" - "$cache/wheel" "$cache/vllm-rs-$vllm" <<'PY'
import glob, os, sys, zipfile
folder, target = sys.argv[1:]
with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as wheel, open(target, "wb") as file:
    file.write(wheel.read("vllm/vllm-rs"))
os.chmod(target, 0o755)
PY
    rm -rf "$cache/wheel"
fi

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
"$binary" serve --host 127.0.0.1 --port "$port" 2>"$cache/serve.log" &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true' EXIT
"$binary" wait --url "$url" --timeout 180

passed=0
failed=0
# Adds up the closing lines of the scripts; one that dies without its line counts as one failure.
count() {
    local line
    line=$("$@" | tee >(cat >&2) | tail -1) || true
    if [[ $line =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
    else
        failed=$((failed + 1))
    fi
}

count "$python" tests/clients/openai_client.py "$url"
count "$python" tests/clients/langchain_client.py "$url"
count "$python" tests/clients/structured_output.py "$url"

"$cache/vllm-rs-$vllm" bench serve --backend openai-chat --base-url "$url" --model k26-mini --tokenizer models/k26-mini --trust-remote-code \
    --dataset-name random --random-input-len 64 --random-output-len 16 --num-prompts 500 --max-concurrency 16 --ignore-eos --disable-tqdm \
    --save-result --result-dir "$cache" --result-filename load.json >"$cache/load.log" 2>&1 || tail -20 "$cache/load.log" >&2
count "$python" - "$cache/load.json" <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
print(f"vllm-rs: {result['completed']} completed, {result['failed']} failed, {result['output_throughput']:.0f} tokens/s", file=sys.stderr)
good = result["completed"] == 500 and result["failed"] == 0
print(f"{int(good)} passed, {int(not good)} failed")
PY

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
