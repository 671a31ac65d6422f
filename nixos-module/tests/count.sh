# Counting for the tests: `ok NAME COMMAND…`, `no COMMAND…`, and `summary` at the end. Sourced.
passed=0 failed=0
ok() {
  local name=$1; shift
  if "$@" > "${OUT:=$(mktemp)}" 2>&1; then
    passed=$((passed + 1)); echo "ok    $name"
  else
    failed=$((failed + 1)); echo "FAIL  $name"; tail -25 "$OUT" | sed 's/^/      | /'
  fi
}
no() { ! "$@"; }
# The command fails, and says why.
fails_with() { local text=$1 out; shift; if out=$("$@" 2>&1); then echo "succeeded: $out"; return 1; fi; echo "$out"; grep -qE -- "$text" <<< "$out"; }
summary() { rm -f "$OUT"; echo "$passed passed, $failed failed"; [ $failed = 0 ]; }
