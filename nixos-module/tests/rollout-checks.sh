# The checks of rollout.sh, run inside the machine. Each function is one promise; `ok` counts.
# usage: checks.sh [CHECK…]   (default: all, in this order)
#        checks.sh --mutate [MUTANT…]   breaks one line of a unit at a time and wants the check of that promise to fail
URL=http://127.0.0.1:8000 UNIT=kdtree.service KEY=old-key
passed=0 failed=0

ok() { # NAME COMMAND…
  local name=$1; shift
  if "$@"; then passed=$((passed + 1)); echo "ok    $name"; else failed=$((failed + 1)); echo "FAIL  $name"; explain; fi
}
explain() {
  systemctl show -p ActiveState,Result,NRestarts,ExecMainStatus $UNIT | paste -sd' ' | sed 's/^/      /'
  { tail -3 /tmp/switch.log; journalctl -u $UNIT -n 6 --no-pager -o cat; } 2>/dev/null | cut -c1-180 | sed 's/^/      | /'
}
no() { ! "$@"; }
prop() { systemctl show -P "$1" "${2:-$UNIT}"; }
is() { [ "$(prop "$1" "${3:-$UNIT}")" = "$2" ]; }
status_says() { prop StatusText | grep -qiE -- "$1"; }
# Lines of this run of a unit.
log() { journalctl -u "${1:-$UNIT}" --no-pager -o cat --since "@$since" 2>/dev/null; }
log_says() { log "${2:-$UNIT}" | grep -qE -- "$1"; }
until_() { # SECONDS COMMAND…
  local end=$(($(date +%s) + $1)); shift
  while ! "$@" 2>/dev/null; do [ "$(date +%s)" -ge $end ] && return 1; sleep .1; done
}
machine() { since=$(date +%s.%N); switch "$MACHINES/$1" > /tmp/switch.log 2>&1; }
forced() { since=$(date +%s.%N); NIXOS_NO_CHECK=1 switch "$MACHINES/$1" > /tmp/switch.log 2>&1; }
body() { printf '{"prompt": "%s", "max_tokens": %s, "temperature": 0, "ignore_eos": true, "stream": %s}' "${3:-1, 2, 3,}" "$1" "${2:-false}"; }
ask() { curl -sS --max-time "${3:-30}" -H "Authorization: Bearer ${2:-$KEY}" -H 'content-type: application/json' -d "$(body "$1")" $URL/v1/completions; }
completes() { ask "${1:-2}" | jq -e '.usage.completion_tokens > 0' >/dev/null; }
http() { curl -s -o /dev/null -w '%{http_code}' --max-time 10 -H "Authorization: Bearer ${2-$KEY}" "$URL$1"; }
answers() { [ "$(http "$2" "$3")" = "$1" ]; }
metric() { curl -s $URL/metrics | grep -E -- "^$1" | sed 's/.* //' | head -1; }
active() { is ActiveState active; }
invocation() { prop InvocationID; }
restarted_from() { [ "$(invocation)" != "$1" ] && active; }

ready_only_after_the_gate() {
  since=$(date +%s.%N)
  switch "$MACHINES/first" > /tmp/switch.log 2>&1 & local pid=$! early=0 seen=''
  while kill -0 $pid 2>/dev/null; do
    seen+="$(prop StatusText)"$'\n'
    # The certificate is there before the first green answer, or the gate had not passed yet.
    if [ "$(curl -s -o /dev/null -w '%{http_code}' --max-time 2 $URL/health)" = 200 ] && ! answers 200 /gate $KEY; then early=1; fi
    sleep .02
  done
  wait $pid; local status=$?
  ok "switch to the first machine succeeds" test $status = 0
  ok "the service is ready" active
  ok "no green health before it" test $early = 0
  ok "the gate was named in STATUS while it ran" grep -qi gate <<< "$seen"
  ok "STATUS says that the gate passed" status_says 'gate passed'
  ok "the certificate is kept in the state directory" test -n "$(find /var/lib/private/kdtree /var/lib/kdtree/ -name '*.json' 2>/dev/null | head -1)"
  ok "it completes" completes
  ok "it runs as a dynamic user" test "$(stat -c %u /proc/"$(prop MainPID)")" -ge 61184
  ok "metrics are there" test -n "$(metric 'vllm:generation_tokens_total')"
}

# An unknown key is only a warning, with status 0: anything said is a failure.
verified() { local said; said=$(systemd-analyze verify --man=no "$@" 2>&1) && [ -z "$said" ] || { echo "$said"; return 1; }; }
exposed() { systemd-analyze security --no-pager --offline=true --threshold=30 "$1" > /tmp/exposure 2>&1; }

units_are_clean() {
  local dir
  ok "systemd-analyze verify says nothing" verified /etc/systemd/system/kdtree.service "$MACHINES"/mute/units/kdtree-*.{service,timer}
  for dir in first busy cards; do
    ok "exposure of kdtree.service ($dir) is at most 3.0" exposed "$MACHINES/$dir/units/kdtree.service"; tail -1 /tmp/exposure
  done
  sed 's/^WatchdogSec/WatchdogSecs/' /etc/systemd/system/kdtree.service > /tmp/kdtree.service
  ok "a misspelt key is noticed" no verified /tmp/kdtree.service
  sed '/^Protect/d; /^SystemCallFilter/d; /^Restrict/d' /etc/systemd/system/kdtree.service > /tmp/kdtree.service
  ok "an opened sandbox is noticed" no exposed /tmp/kdtree.service
}

dashboards_name_existing_metrics() {
  local name missing=''
  curl -s $URL/metrics > /tmp/metrics
  for name in $(grep -ohE '(vllm|kdtree):[a-z_]+' /root/monitoring/* | sort -u); do grep -q "$name" /tmp/metrics || missing+="$name "; done
  ok "dashboard and alerts name metrics that exist${missing:+: not $missing}" test -z "$missing"
}

keys() {
  local pid; pid=$(prop MainPID)
  ok "no key: 401" answers 401 /v1/models ''
  ok "wrong key: 401" answers 401 /v1/models wrong-key
  ok "right key: 200" answers 200 /v1/models old-key
  echo new-key > /etc/kdtree/api-keys
  ok "a new key is unknown before the reload" answers 401 /v1/models new-key
  ok "reload" systemctl reload $UNIT
  ok "the reloaded key works" until_ 5 answers 200 /v1/models new-key
  ok "the old key is out" answers 401 /v1/models old-key
  ok "the process is the same" is MainPID "$pid"
  KEY=new-key
}

unchanged_restart_skips_the_gate() {
  since=$(date +%s.%N)
  ok "restart" systemctl restart $UNIT
  ok "STATUS says that it passed before" status_says 'gate passed before'
}

killed_is_restarted() {
  local before; before=$(invocation)
  kill -9 "$(prop MainPID)"
  ok "kill -9 is restarted" until_ 30 restarted_from "$before"
  ok "it is counted" is NRestarts 1
  ok "it completes again" until_ 10 completes
}

stop_drains() {
  curl -sN --max-time 60 -H "Authorization: Bearer $KEY" -H 'content-type: application/json' -d "$(body 1500 true)" $URL/v1/completions > /tmp/stream & local pid=$!
  until_ 10 grep -q data: /tmp/stream
  systemctl stop --no-block $UNIT; until_ 5 is ActiveState deactivating
  ok "the stream still runs when the stop begins" no grep -q '\[DONE\]' /tmp/stream
  ok "new requests are refused meanwhile" answers 503 /health
  wait $pid
  ok "the running stream ends with [DONE]" grep -q '\[DONE\]' /tmp/stream
  ok "and not with an error" no grep -q '"error"' /tmp/stream
  ok "the service is down" until_ 30 is ActiveState inactive
  ok "with success" is Result success
  systemctl start $UNIT
}

changes_run_the_gate_again() {
  ok "switch to other prompts" machine prompts
  ok "they ran the gate again" no status_says 'passed before'
  ok "it passed" status_says 'gate passed'
  ok "switch to another binary" machine binary
  ok "it ran the gate again" no status_says 'passed before'
  ok "it passed" status_says 'gate passed'
  ok "back to the first machine" machine first
  ok "whose certificate still holds" status_says 'gate passed before'
}

bad_build_is_refused_before_the_switch() {
  local pid; pid=$(prop MainPID)
  while sleep .1; do http /v1/models; echo; done > /tmp/answers & local poll=$!
  ok "the switch is refused" no machine blocked
  kill $poll; wait $poll 2>/dev/null
  ok "the refusal names the gate" grep -q 'fails its gate' /tmp/switch.log
  ok "the old server kept answering" test "$(sort -u /tmp/answers)" = 200
  ok "its process is the same" is MainPID "$pid"
  ok "its units are the same" cmp -s /etc/systemd/system/$UNIT "$MACHINES/first/units/$UNIT"
}

failed_gate_blocks() {
  ok "past the check, the start fails" no forced blocked
  ok "the service has failed" is ActiveState failed
  ok "with status 78" is ExecMainStatus 78
  ok "the log names the gate" log_says 'gate'
  sleep 4
  ok "it stays down" is ActiveState failed
  ok "and was never restarted" is NRestarts 0
}

failed_gate_with_baseline_serves_off() {
  ok "the start succeeds" forced baseline
  ok "STATUS says so" status_says 'gate failed'
  ok "the log says so" log_says 'baseline kernel'
  ok "metrics say verify off" test "$(metric 'kdtree:verify_mode.*mode="off"')" = 1
  ok "metrics do not say verify on" test "$(metric 'kdtree:verify_mode.*mode="on"')" = 0
  ok "it completes" completes 8
}

hung_engine_is_restarted_by_the_watchdog() {
  ok "switch" machine hung
  local before; before=$(invocation)
  ask 40 $KEY 3 >/dev/null 2>&1
  ok "HTTP still answers while the engine hangs" test "$(curl -s -o /dev/null -w '%{http_code}' --max-time 2 $URL/health)" != 000
  ok "the watchdog restarts it" until_ 60 restarted_from "$before"
  ok "the journal names the watchdog" test -n "$(journalctl --no-pager -o cat --since "@$since" | grep -i "kdtree.service.*watchdog")"
  ok "it completes again" until_ 10 completes 1
}

dead_engine_is_restarted() {
  ok "switch" machine dead
  local before; before=$(invocation)
  ask 40 $KEY 5 >/dev/null 2>&1
  ok "the process ends and is restarted" until_ 40 restarted_from "$before"
  ok "the log says that the engine stopped" log_says 'engine has stopped'
  ok "it completes again" until_ 10 completes 1
}

health_passes_a_busy_server() {
  ok "switch" machine busy
  local before pids=() n; before=$(invocation)
  curl -sN --max-time 90 -H "Authorization: Bearer $KEY" -H 'content-type: application/json' -d "$(body 40 true)" $URL/v1/completions > /tmp/stream & local pid=$!
  ok "the probe calls it busy: tokens advance" until_ 30 log_says 'busy, counted as healthy: .*tokens went through' kdtree-health.service
  for n in 1 2 3 4 5 6; do ask 4 $KEY 60 >/dev/null 2>&1 & pids+=($!); done
  ok "the probe calls it busy: 429" until_ 30 log_says 'busy, counted as healthy: .*429' kdtree-health.service
  wait $pid "${pids[@]}"
  ok "the stream reached its end" grep -q '\[DONE\]' /tmp/stream
  ok "the server was not restarted" test "$(invocation)" = "$before"
  ok "and is called healthy again" until_ 40 log_says 'healthy: 3 tokens' kdtree-health.service
}

health_restarts_a_mute_server() {
  ok "switch" machine mute
  local before; before=$(invocation)
  ask 40 $KEY 1 >/dev/null 2>&1
  ok "the probe finds it mute" until_ 40 log_says 'unhealthy: 2 attempts' kdtree-health.service
  ok "it is restarted" until_ 90 restarted_from "$before"
  ok "the reason is logged" log_says 'generated nothing .* restarting it' kdtree-restart.service
  ok "it was not the watchdog" no log_says 'kdtree.service.*watchdog' init.scope
}

hidden_model_is_named() {
  ok "the start fails" no forced_briefly hidden
  ok "one line names the path" test "$(log | grep -c 'kdtree: .*/home/alice/model')" -ge 1
  ok "and what is wrong" log_says '/home/alice/model.*(no such directory|not found)'
  systemctl stop $UNIT
}

# A start that systemd would try again for ever.
forced_briefly() { since=$(date +%s.%N); forced "$1" & local pid=$!; until_ 20 log_says 'kdtree: '; systemctl stop $UNIT; wait $pid; }

missing_gpus_fail() {
  ok "the start fails" no forced_briefly cards
  ok "the missing card is named" log_says '/dev/nvidia0 is missing: 2 GPUs are configured'
  ok "it never served" no log_says 'listening'
}

warmup_prompts_are_completed() {
  ok "switch" machine warm
  ok "both prompts, two tokens each" log_says 'healthy: 4 tokens'
}

ALL="ready_only_after_the_gate units_are_clean dashboards_name_existing_metrics keys unchanged_restart_skips_the_gate killed_is_restarted stop_drains
changes_run_the_gate_again bad_build_is_refused_before_the_switch failed_gate_blocks failed_gate_with_baseline_serves_off
warmup_prompts_are_completed hung_engine_is_restarted_by_the_watchdog dead_engine_is_restarted health_passes_a_busy_server
health_restarts_a_mute_server hidden_model_is_named missing_gpus_fail"
# NAME | machine | unit | sed | check. A promise whose check passes on the broken unit is not tested.
MUTANTS='
no-drain          | first   | kdtree.service        | s/^KillSignal=SIGTERM/KillSignal=SIGKILL/     | stop_drains
impatient-probe   | busy    | kdtree-health.service | s#^ExecStart=.*#ExecStart=/usr/local/bin/probe# | health_passes_a_busy_server
open-home         | hidden  | kdtree.service        | /^ProtectHome=/d                              | hidden_model_is_named
unchecked-cards   | cards   | kdtree.service        | /^ExecStartPre=.*nvidia/d                     | missing_gpus_fail
no-restart        | dead    | kdtree.service        | s/^Restart=on-failure/Restart=no/             | dead_engine_is_restarted
no-watchdog       | hung    | kdtree.service        | s/^WatchdogSec=.*/WatchdogSec=0/              | hung_engine_is_restarted_by_the_watchdog
restarted-gate    | blocked | kdtree.service        | /^RestartPreventExitStatus=/d                 | failed_gate_blocks
no-restart-health | mute    | kdtree-health.service | /^OnFailure=/d                                | health_restarts_a_mute_server
no-warm-up        | warm    | kdtree.service        | /^ExecStartPost=/d                            | warmup_prompts_are_completed'

# A machine like MACHINE, with one unit changed; the others as they are. Prints the folder of machines.
mutated() { # MACHINE UNIT SED
  local folder; folder=$(mktemp -d)
  ln -s "$MACHINES"/* "$folder/"; rm "$folder/$1"
  mkdir -p "$folder/$1/units"
  cp "$MACHINES/$1/pre-switch-checks" "$folder/$1/"; cp -a "$MACHINES/$1/units/." "$folder/$1/units/"; chmod -R u+w "$folder/$1"
  sed -i "$3" "$folder/$1/units/$2"
  cmp -s "$folder/$1/units/$2" "$MACHINES/$1/units/$2" && { echo "the change to $2 of $1 changes nothing" >&2; return 1; }
  echo "$folder"
}

# Whether the check fails on the mutant; what it says goes to a file.
noticed() { # MACHINE UNIT SED CHECK
  local folder; folder=$(mutated "$1" "$2" "$3") || return 1
  (
    MACHINES=$folder passed=0 failed=0
    # Checks that expect a server find the mutant; the others switch to it themselves.
    case $4 in stop_drains) machine "$1" ;; esac
    "$4"; [ $failed -gt 0 ]
  ) > /tmp/mutant 2>&1
}

mutate() { # [MUTANT…]
  local name machine unit change check wanted=" $* "
  printf '#!/bin/sh\nexec curl -fsS --max-time 2 -H "Authorization: Bearer %s" -d "{\\"prompt\\": \\"1\\", \\"max_tokens\\": 3}" -H "content-type: application/json" %s/v1/completions\n' \
    "$KEY" $URL > /usr/local/bin/probe; chmod +x /usr/local/bin/probe
  while IFS='|' read -r name machine unit change check; do
    read -r name <<< "$name"; read -r machine <<< "$machine"; read -r unit <<< "$unit"; read -r change <<< "$change"; read -r check <<< "$check"
    [ -n "$name" ] || continue
    [ "$wanted" = '  ' ] || [[ $wanted = *" $name "* ]] || continue
    ok "$name: $check fails" noticed "$machine" "$unit" "$change" "$check" < /dev/null
    grep -h '^FAIL' /tmp/mutant | sed 's/^/      /'
    systemctl stop 'kdtree*' 2>/dev/null; systemctl reset-failed 2>/dev/null
  done <<< "$MUTANTS"
}

if [ "${1-}" = --mutate ]; then
  shift; mutate "$@"
  echo "$passed passed, $failed failed"
  [ $failed = 0 ]; exit
fi

for check in ${*:-$ALL}; do
  echo "-- $check"; $check
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
