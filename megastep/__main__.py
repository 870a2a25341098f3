import sys

from megastep.cli import main

if __name__ == "__main__":
    sys.exit(main())
