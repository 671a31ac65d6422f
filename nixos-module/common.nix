# What the service and its health check share.
{ lib }:
{
  # Where a server that listens on `host` is reached from its own machine.
  url = { host, port, ... }:
    let
      reachable = { "0.0.0.0" = "127.0.0.1"; "::" = "::1"; }.${host} or host;
      bracketed = if lib.hasInfix ":" reachable then "[${reachable}]" else reachable;
    in
    "http://${bracketed}:${toString port}";

  # A command line as systemd reads it: quoted, and nothing in it expanded.
  commandLine = arguments: lib.concatMapStringsSep " "
    (argument: builtins.toJSON (lib.replaceStrings [ "%" "$" ] [ "%%" "$$" ] (toString argument)))
    arguments;
}
