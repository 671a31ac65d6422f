# The NixOS VM test: the same promises as rollout.sh, on a whole NixOS. Needs full nixpkgs and a builder with KVM.
{ pkgs, module, kdtree-cpu, kdtree-faults }:
let
  keys = "/etc/kdtree/api-keys";
  machine = { package, environment ? { }, onFailure ? "block" }: {
    imports = [ module ];
    services.kdtree = {
      enable = true;
      inherit package environment;
      apiKeyFile = keys;
      gate = { maxTokens = 8; inherit onFailure; };
      watchdog = 10;
      health = { interval = 5; timeout = 5; attempts = 2; };
      limits.memoryMax = "2G";
    };
    environment.etc."kdtree/api-keys" = { text = "secret-key\n"; mode = "0400"; };
    environment.systemPackages = [ pkgs.curl ];
    virtualisation.memorySize = 3072;
  };
in
pkgs.testers.runNixOSTest {
  name = "kdtree";
  nodes = {
    good = machine { package = kdtree-cpu; };
    blocked = machine { package = kdtree-faults; environment.KDTREE_FAULT = "kernel-error=1"; };
    baseline = machine { package = kdtree-faults; environment.KDTREE_FAULT = "kernel-error=1"; onFailure = "baseline"; };
  };
  testScript = ''
    import json

    CHAT = (
        "curl -fsS -H 'Authorization: Bearer secret-key' -H 'content-type: application/json' "
        "http://127.0.0.1:8000/v1/completions -d '{\"prompt\": \"1, 2, 3,\", \"max_tokens\": 4}'"
    )

    start_all()

    with subtest("ready only after the gate, then it completes"):
        good.wait_for_unit("kdtree.service")
        status = good.succeed("systemctl show -P StatusText kdtree.service")
        assert "gate passed" in status, status
        answer = json.loads(good.succeed(CHAT))
        assert answer["usage"]["completion_tokens"] > 0, answer
        good.fail("curl -fsS -H 'Authorization: Bearer wrong' http://127.0.0.1:8000/v1/models")

    with subtest("limits are enforced"):
        limit = good.succeed("cat /sys/fs/cgroup/system.slice/kdtree.service/memory.max").strip()
        assert limit == str(2 * 1024**3), limit

    with subtest("kill -9 is restarted, by certificate"):
        good.succeed("systemctl kill -s KILL kdtree.service")
        good.wait_until_succeeds("systemctl show -P NRestarts kdtree.service | grep -qx 1", timeout=60)
        good.wait_until_succeeds(CHAT, timeout=120)
        assert "gate passed before" in good.succeed("systemctl show -P StatusText kdtree.service")

    with subtest("a failed gate that blocks stays down"):
        blocked.wait_until_succeeds("systemctl is-failed kdtree.service", timeout=300)
        assert blocked.succeed("systemctl show -P ExecMainStatus kdtree.service").strip() == "78"
        assert blocked.succeed("systemctl show -P NRestarts kdtree.service").strip() == "0"

    with subtest("a failed gate with baseline serves with the baseline kernel"):
        baseline.wait_for_unit("kdtree.service")
        assert "GATE FAILED" in baseline.succeed("systemctl show -P StatusText kdtree.service")
        baseline.succeed(CHAT)
        baseline.succeed("curl -fsS http://127.0.0.1:8000/metrics | grep 'kdtree:verify_mode.*mode=\"off\".* 1$'")

    with subtest("it stops"):
        good.succeed("systemctl stop kdtree.service")
        assert good.succeed("systemctl show -P Result kdtree.service").strip() == "success"
  '';
}
