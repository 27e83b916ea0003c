"""Run the `paceline` command, also as `python -m paceline`. Little is imported here: Ctrl-C may come at any moment."""

import sys


def main() -> int:
    """Run the command; Ctrl-C while it is loaded ends it as it does later: with a line, and 130."""
    try:
        from paceline.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
