"""What the client scripts share: checks that are counted, and the closing line that run.sh adds up."""

import sys

counts = {"passed": 0, "failed": 0}


def checks(client):
    """A decorator factory: `@check("name")` runs a function at once; every failure is counted and shown."""
    def check(name):
        def run(test):
            try:
                test()
                counts["passed"] += 1
            except Exception as error:
                counts["failed"] += 1
                print(f"{client}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return run
    return check


def finish():
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(counts["failed"] > 0)
