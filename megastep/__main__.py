import sys

from megastep import stopping

if __name__ == "__main__":
    stopping.listen()  # before the imports of the command line
    from megastep.cli import main

    sys.exit(main())
