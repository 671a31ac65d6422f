# Small re-implementation of the part of nixpkgs' lib that this flake and its module use.
# Only for offline evaluation in CI: a name missing here is an evaluation error, never a silent pass.
let
  inherit (builtins) all any attrNames attrValues concatLists concatMap concatStringsSep elem elemAt filter foldl' hasAttr head isAttrs isBool isFloat isFunction isInt isList isPath isString length listToAttrs map mapAttrs match replaceStrings stringLength substring toJSON toString;
  lib = rec {
    inherit (builtins) all any attrNames attrValues concatLists concatMap concatStringsSep elem elemAt filter foldl' hasAttr head tail isAttrs isBool isFloat isFunction isInt isList isPath isString length listToAttrs map mapAttrs match replaceStrings stringLength substring toJSON toString genList functionArgs intersectAttrs removeAttrs readFile fromJSON seq deepSeq trace pathExists catAttrs partition sort;
    fix = f: let x = f x; in x;
    importTOML = p: builtins.fromTOML (readFile p);
    cleanSourceWith = { src, filter ? _: _: true, name ? "source" }: builtins.path { path = src; inherit filter name; };
    filterAttrsRecursive = p: s: listToAttrs (concatMap (n: let v = s.${n}; in if p n v then [ (nameValuePair n (if isAttrs v && !(isDerivation v) then filterAttrsRecursive p v else v)) ] else [ ]) (attrNames s));
    hasInfix = i: s: length (builtins.split (escapeRegex i) s) > 1;
    escapeRegex = replaceStrings (map (c: c) [ "\\" "^" "$" "." "|" "?" "*" "+" "(" ")" "[" "]" "{" "}" ]) [ "\\\\" "\\^" "\\$" "\\." "\\|" "\\?" "\\*" "\\+" "\\(" "\\)" "\\[" "\\]" "\\{" "\\}" ];
    id = x: x;
    const = x: _: x;
    flip = f: a: b: f b a;
    throwIf = c: m: x: if c then throw m else x;
    assertMsg = c: m: if c then true else throw m;
    optional = c: x: if c then [ x ] else [ ];
    optionals = c: x: if c then x else [ ];
    optionalString = c: s: if c then s else "";
    optionalAttrs = c: a: if c then a else { };
    flatten = x: if isList x then concatMap flatten x else [ x ];
    unique = foldl' (a: e: if elem e a then a else a ++ [ e ]) [ ];
    toList = x: if isList x then x else [ x ];
    last = l: elemAt l (length l - 1);
    imap0 = f: l: genList (i: f i (elemAt l i)) (length l);
    reverseList = l: genList (i: elemAt l (length l - 1 - i)) (length l);
    range = a: b: if a > b then [ ] else genList (n: a + n) (b - a + 1);
    nameValuePair = name: value: { inherit name value; };
    genAttrs = ns: f: listToAttrs (map (n: nameValuePair n (f n)) ns);
    mapAttrs' = f: s: listToAttrs (map (n: f n s.${n}) (attrNames s));
    mapAttrsToList = f: s: map (n: f n s.${n}) (attrNames s);
    filterAttrs = p: s: listToAttrs (concatMap (n: if p n s.${n} then [ (nameValuePair n s.${n}) ] else [ ]) (attrNames s));
    recursiveUpdate = a: b: a // mapAttrs (n: v: if a ? ${n} && isAttrs a.${n} && isAttrs v then recursiveUpdate a.${n} v else v) b;
    attrByPath = p: d: s: if p == [ ] then s else if s ? ${head p} then attrByPath (tail p) d s.${head p} else d;
    concatMapStringsSep = sep: f: l: concatStringsSep sep (map f l);
    concatStrings = concatStringsSep "";
    concatMapStrings = f: l: concatStrings (map f l);
    concatLines = l: concatMapStrings (s: s + "\n") l;
    hasPrefix = p: s: substring 0 (stringLength p) s == p;
    hasSuffix = p: s: let n = stringLength s; m = stringLength p; in n >= m && substring (n - m) m s == p;
    removePrefix = p: s: if hasPrefix p s then substring (stringLength p) (-1) s else s;
    removeSuffix = p: s: if hasSuffix p s then substring 0 (stringLength s - stringLength p) s else s;
    escapeShellArg = a: let s = toString a; in if match "[[:alnum:],._+:@%/-]+" s != null then s else "'${replaceStrings [ "'" ] [ "'\\''" ] s}'";
    escapeShellArgs = concatMapStringsSep " " escapeShellArg;
    boolToString = b: if b then "true" else "false";
    versionAtLeast = a: b: builtins.compareVersions a b >= 0;
    makeBinPath = l: concatStringsSep ":" (map (p: "${p}/bin") (filter (x: x != null) l));
    makeLibraryPath = l: concatStringsSep ":" (map (p: "${p.lib or p}/lib") (filter (x: x != null) l));
    getBin = p: p;
    getLib = p: p.lib or p;
    getExe = p: "${p}/bin/${p.meta.mainProgram or p.pname or p.name}";
    getExe' = p: n: "${p}/bin/${n}";
    getName = p: p.pname or p.name;
    isDerivation = v: isAttrs v && (v.type or "") == "derivation";
    licenses = genAttrs [ "mit" "asl20" "bsd3" "unfree" ] id;
    platforms = { linux = [ "x86_64-linux" ]; };
    systems.flakeExposed = [ "x86_64-linux" ];
    maintainers = { };
    cleanSource = s: s;
    sourceByRegex = s: _: s;
    # ---- module system
    mkIf = condition: content: { _type = "if"; inherit condition content; };
    mkMerge = contents: { _type = "merge"; inherit contents; };
    mkOverride = priority: content: { _type = "override"; inherit priority content; };
    mkDefault = mkOverride 1000;
    mkForce = mkOverride 50;
    mkOptionDefault = mkOverride 1500;
    mkVMOverride = mkOverride 10;
    mkOrder = priority: content: { _type = "order"; inherit priority content; };
    mkBefore = mkOrder 500;
    mkAfter = mkOrder 1500;
    mkOption = a: a // { _type = "option"; };
    mkEnableOption = d: mkOption { type = types.bool; default = false; description = "Whether to enable ${d}."; };
    mkPackageOption = pkgs: n: o: mkOption { type = types.package; default = pkgs.${n}; };
    literalExpression = t: t;
    mdDoc = id;
    isType = t: v: isAttrs v && (v._type or "") == t;
    showOption = concatStringsSep ".";
    discharge = prio: ord: d:
      let v = d.value; r = x: d // { value = x; }; in
      if isType "merge" v then concatMap (c: discharge prio ord (r c)) v.contents
      else if isType "if" v then (if v.condition then discharge prio ord (r v.content) else [ ])
      else if isType "override" v then discharge v.priority ord (r v.content)
      else if isType "order" v then discharge prio v.priority (r v.content)
      else [ (d // { prio = prio; ord = ord; }) ];
    mergeDefs = loc: type: defs:
      let
        ds = concatMap (discharge 100 1000) defs;
        best = foldl' (a: d: if d.prio < a then d.prio else a) 9999 ds;
        use = builtins.sort (a: b: a.ord < b.ord) (filter (d: d.prio == best) ds);
        bad = filter (d: !(type.check d.value)) use;
      in
      { isDefined = use != [ ]; value = if use == [ ] then throw "The option `${showOption loc}' was accessed but has no value defined." else if bad != [ ] then throw "A definition for option `${showOption loc}' is not of type `${type.name}'. In `${(head bad).file}': ${builtins.typeOf (head bad).value} ${if isString (head bad).value || isInt (head bad).value || isBool (head bad).value then toJSON (head bad).value else ""}" else type.merge loc use; };
    pushDown = v: if isType "merge" v then concatMap pushDown v.contents else if isType "if" v then map (mapAttrs (_: mkIf v.condition)) (pushDown v.content) else if isType "override" v then map (mapAttrs (_: mkOverride v.priority)) (pushDown v.content) else [ v ];
    mergeOptionTrees = loc: ts: let names = unique (concatMap attrNames ts); in genAttrs names (n: let vs = concatMap (t: optional (t ? ${n}) t.${n}) ts; in if any (isType "option") vs then (if length vs > 1 then throw "The option `${showOption (loc ++ [ n ])}' is declared twice" else head vs) else mergeOptionTrees (loc ++ [ n ]) vs);
    evalModules = { modules, specialArgs ? { }, prefix ? [ ], class ? null }:
      let
        args = specialArgs // { inherit lib config options; };
        load = parent: m:
          let
            file = if isPath m || isString m then toString m else m._file or parent;
            raw = if isPath m || isString m then import m else m;
            called = if isFunction raw || (isAttrs raw && raw ? __functor) then raw (let want = builtins.functionArgs raw; extra = config._module.args; in if want == { } then args else mapAttrs (n: _: args.${n} or extra.${n} or (throw "module argument `${n}' not known in ${file}")) (filterAttrs (n: opt: !opt || args ? ${n}) want)) else raw;
            body = if called ? options || called ? config || called ? imports && !(any (n: !(elem n [ "imports" "_file" "key" "freeformType" "_class" "meta" ])) (attrNames called)) then called else { imports = called.imports or [ ]; config = removeAttrs called [ "imports" "_file" "key" "freeformType" ]; } // optionalAttrs (called ? freeformType) { inherit (called) freeformType; };
          in
          [{ inherit file; options = body.options or { }; config = body.config or { }; freeformType = body.freeformType or null; }] ++ concatMap (load file) (body.imports or [ ]);
        all' = concatMap (load "<module>") ([{ options._module.args = mkOption { type = types.attrsOf types.raw; default = { }; }; }] ++ modules);
        options = mergeOptionTrees prefix (map (m: m.options) all');
        freeform = foldl' (a: m: if m.freeformType != null then m.freeformType else a) null all';
        evalTree = loc: opts: defs: top:
          let
            flat = concatMap (d: map (v: d // { value = v; }) (pushDown d.value)) defs;
            bad = filter (d: !(isAttrs d.value)) flat;
            names = unique (concatMap (d: attrNames d.value) flat);
            unknown = filter (n: !(opts ? ${n})) names;
            defsOf = n: concatMap (d: optional (d.value ? ${n}) (d // { value = d.value.${n}; })) flat;
            known = mapAttrs (n: o: if isType "option" o then evalOpt (loc ++ [ n ]) o (defsOf n) else evalTree (loc ++ [ n ]) o (defsOf n) false) opts;
          in
          if bad != [ ] then throw "The option `${showOption loc}' is not an attribute set in ${(head bad).file}"
          else if unknown != [ ] && !(top && freeform != null) then throw "The option `${showOption (loc ++ [ (head unknown) ])}' does not exist. Definition in `${(head (filter (d: d.value ? ${head unknown}) flat)).file}'"
          else known // optionalAttrs (unknown != [ ]) (genAttrs unknown (n: (mergeDefs (loc ++ [ n ]) (freeform.nestedTypes.elemType or types.anything) (defsOf n)).value));
        evalOpt = loc: o: defs:
          let
            t = o.type or types.anything;
            m = mergeDefs loc t (defs ++ optional (o ? default) { file = "<default>"; value = mkOptionDefault o.default; });
            v = if m.isDefined then m.value else if t ? emptyValue then t.emptyValue else m.value; # submodule options have an implicit {}
          in
          if (o.readOnly or false) && length defs > 1 then throw "read-only option ${showOption loc} set twice" else (o.apply or id) v;
        config = evalTree prefix options (map (m: { inherit (m) file; value = m.config; }) all') true;
      in
      { config = removeAttrs config [ "_module" ]; inherit options; };
    types =
      let
        t = name: check: { inherit name check; merge = mergeEq; };
        mergeEq = loc: ds: if all (d: d.value == (head ds).value) ds then (head ds).value else throw "The option `${showOption loc}' has conflicting definition values: ${concatStringsSep ", " (map (d: d.file) ds)}";
        isStr = x: isString x || isDrvLike x;
        isDrvLike = x: isAttrs x && x ? outPath;
      in
      rec {
        inherit (lib) mkOptionType; raw = (t "raw" (_: true)) // { merge = loc: ds: if length ds == 1 then (head ds).value else throw "${showOption loc} defined twice"; };
        unspecified = raw;
        anything = { name = "anything"; check = _: true; merge = loc: ds: if all (d: isAttrs d.value && !(isDrvLike d.value)) ds then (attrsOf anything).merge loc ds else if all (d: isList d.value) ds then concatMap (d: d.value) ds else mergeEq loc ds; };
        bool = t "boolean" isBool;
        int = t "signed integer" isInt;
        float = t "float" isFloat;
        number = t "number" (x: isInt x || isFloat x);
        str = t "string" isString;
        nonEmptyStr = t "non-empty string" (x: isString x && match "[ \t\n]*" x == null);
        singleLineStr = t "single-line string" (x: isString x && match ".*\n.*" x == null);
        strMatching = re: t "string matching ${re}" (x: isString x && match re x != null);
        port = t "16 bit port" (x: isInt x && x >= 0 && x <= 65535);
        ints = rec { positive = t "positive integer" (x: isInt x && x > 0); unsigned = t "unsigned integer" (x: isInt x && x >= 0); between = a: b: t "integer between ${toString a} and ${toString b}" (x: isInt x && x >= a && x <= b); u16 = between 0 65535; u8 = between 0 255; u32 = between 0 4294967295; };
        path = t "path" (x: (isPath x) || (isStr x && substring 0 1 (toString x) == "/"));
        package = t "package" (x: isDrvLike x || (isString x && lib.hasPrefix builtins.storeDir x));
        enum = vs: t "one of ${toJSON vs}" (x: elem x vs);
        separatedString = sep: { name = "strings joined"; check = isString; merge = loc: ds: concatStringsSep sep (map (d: d.value) ds); };
        lines = separatedString "\n";
        commas = separatedString ",";
        nullOr = e: { name = "null or ${e.name}"; check = x: x == null || e.check x; merge = loc: ds: if all (d: d.value == null) ds then null else if any (d: d.value == null) ds then throw "${showOption loc}: both null and not null" else e.merge loc ds; };
        either = a: b: { name = "${a.name} or ${b.name}"; check = x: a.check x || b.check x; merge = loc: ds: if all (d: a.check d.value) ds then a.merge loc ds else if all (d: b.check d.value) ds then b.merge loc ds else mergeEq loc ds; };
        oneOf = l: foldl' either (head l) (tail l);
        coercedTo = from: f: to: to // { check = x: from.check x || to.check x; merge = loc: ds: to.merge loc (map (d: d // { value = if from.check d.value then f d.value else d.value; }) ds); };
        listOf = e: { name = "list of ${e.name}"; check = isList; merge = loc: ds: concatMap (d: concatLists (imap0 (i: v: let m = mergeDefs (loc ++ [ "[${toString i}]" ]) e [ (d // { value = v; }) ]; in optional m.isDefined m.value) d.value)) ds; emptyValue = [ ]; };
        attrsOf = e: { name = "attribute set of ${e.name}"; check = isAttrs; nestedTypes.elemType = e; emptyValue = { }; merge = loc: ds: let flat = concatMap (d: map (v: d // { value = v; }) (pushDown d.value)) ds; ms = genAttrs (unique (concatMap (d: attrNames d.value) flat)) (n: mergeDefs (loc ++ [ n ]) e (concatMap (d: optional (d.value ? ${n}) (d // { value = d.value.${n}; })) flat)); in mapAttrs (_: m: m.value) (filterAttrs (_: m: m.isDefined) ms); };
        lazyAttrsOf = attrsOf;
        attrs = attrsOf anything;
        submoduleWith = { modules, specialArgs ? { }, shorthandOnlyDefinesConfig ? false }: { name = "submodule"; check = x: isAttrs x || isFunction x || isPath x; emptyValue = { }; merge = loc: ds: (evalModules { prefix = loc; specialArgs = specialArgs // { name = lib.last loc; }; modules = modules ++ map (d: if isAttrs d.value then { _file = d.file; config = d.value; } else d.value) ds; }).config; };
        submodule = m: submoduleWith { modules = lib.toList m; };
        functionTo = e: t "function" isFunction;
        deferredModule = raw;
        pathInStore = package;
        shellPackage = package;
      };
    nixosSystem = throw "set by flake.nix";
    strings = lib;
    lists = lib;
    attrsets = lib;
    trivial = lib;
    options = lib;
    modules = lib;
    versions.majorMinor = v: concatStringsSep "." (map toString (let l = builtins.splitVersion v; in [ (elemAt l 0) (elemAt l 1) ]));
  };
in
lib
