"""`python -m lyceum_zoo fetch NAME...` fills the cache and prints the folders; `... list` shows what there is."""

import argparse
import sys

from lyceum_zoo import ZooError, describe, entries, path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lyceum_zoo", description="Real data sets and small models by name."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="bring entries into the cache and print their folders")
    fetch.add_argument("names", nargs="+", metavar="NAME")
    commands.add_parser("list", help="describe all entries")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            print("\n".join(describe(entry.name) for entry in entries()))
        else:
            for name in options.names:
                print(path(name))
    except ZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
