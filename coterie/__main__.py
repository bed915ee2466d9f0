"""Run the ``coterie`` command as ``python -m coterie``, which is also how child processes are started (with ``-P``)."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
