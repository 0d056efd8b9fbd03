"""`python -m lyceum_cli` is the `lyceum` command."""

from lyceum_cli.app import app

if __name__ == "__main__":
    app(prog_name="lyceum")
