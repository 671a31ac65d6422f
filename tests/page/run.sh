#!/usr/bin/env bash
# The web page in headless Chromium against the real binary: tests/page/run.sh [target/debug/kdtree] [folder for screenshots]
# Needs node, npm and Debian's package chromium. Ends with "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/debug/kdtree}
cache=$PWD/target/page
mkdir -p "$cache"
[ -d "$cache/node_modules/playwright-core" ] || npm install --silent --no-audit --no-fund --prefix "$cache" playwright-core@1.55.0 >/dev/null
cp tests/page/page.mjs "$cache/page.mjs"
port=$(node -e 'const s = require("net").createServer().listen(0, "127.0.0.1", () => { console.log(s.address().port); s.close(); })')
"$binary" serve --host 127.0.0.1 --port "$port" 2>"$cache/serve.log" &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true' EXIT
"$binary" wait --url "http://127.0.0.1:$port" --timeout 180
node "$cache/page.mjs" "http://127.0.0.1:$port/" ${2:+"$2"}
