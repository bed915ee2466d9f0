"""``python -m coterie`` is the ``coterie`` command; child processes are started so, with ``-P``."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
