"""The command line, such as ``python -m distft consolidate PATH OUT``."""

import sys

from distft.commands import main

if __name__ == "__main__":
    sys.exit(main())
