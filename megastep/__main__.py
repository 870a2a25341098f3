import sys

from megastep import signals

if __name__ == "__main__":
    signals.listen()  # before the imports of the command line
    from megastep.cli import main

    sys.exit(main())
