"""Run the `paceline` command as `python -m paceline`."""

import sys

from paceline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
