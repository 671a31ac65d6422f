# The text of a unit from its NixOS definition, for systemd without NixOS.
{ lib }:
let
  value = v: if v == true then "true" else if v == false then "false" else toString v;
  # A list is a key that occurs several times.
  keys = section: lib.concatMapStrings
    (key: lib.concatMapStrings (v: "${key}=${value v}\n") (lib.toList section.${key}))
    (lib.attrNames section);
  unlessEmpty = key: list: lib.optionalAttrs (list != [ ]) { ${key} = lib.concatStringsSep " " list; };
in
kind: unit:
let
  head = { Description = unit.description; }
    // unlessEmpty "Wants" unit.wants // unlessEmpty "After" unit.after // unlessEmpty "OnFailure" unit.onFailure
    // lib.optionalAttrs (unit.startLimitIntervalSec or null != null) { StartLimitIntervalSec = unit.startLimitIntervalSec; }
    // unit.unitConfig;
  body = if kind == "timer" then "[Timer]\n${keys unit.timerConfig}" else "[Service]\n${keys unit.serviceConfig}";
in
"[Unit]\n${keys head}\n${body}"
  + lib.optionalString (unit.wantedBy != [ ]) "\n[Install]\nWantedBy=${lib.concatStringsSep " " unit.wantedBy}\n"
