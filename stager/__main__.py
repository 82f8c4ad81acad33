"""`python -m stager` is the `stager` command."""

from stager.cli.main import main

if __name__ == "__main__":
    main()
