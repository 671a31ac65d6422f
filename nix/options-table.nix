# The options as a Markdown table for docs/operating.md.
{ lib, pkgs, options }:
let
  isOption = o: (o._type or "") == "option";
  text = v: if builtins.isAttrs v && v ? text then v.text else v;
  shown = v:
    if v == null then "null"
    else if lib.isString v || lib.isBool v || lib.isInt v || lib.isList v then builtins.toJSON v
    else "{ }";
  default = o: if o ? defaultText then text o.defaultText else if o ? default then "`${shown o.default}`" else "";
  # No column of types: their wording is nixpkgs', and moves.
  row = name: o: "| `${name}` | ${default o} | ${o.description} |\n";
  rows = prefix: tree: lib.concatMapStrings
    (name:
      let o = tree.${name}; path = prefix + name; in
      if !isOption o then rows "${path}." o
      else lib.optionalString (!(o.internal or false)) (row path o))
    (lib.filter (name: name != "_module") (lib.attrNames tree));
in
pkgs.writeText "kdtree-options.md" ("| option | default | |\n|---|---|---|\n" + rows "" options)
