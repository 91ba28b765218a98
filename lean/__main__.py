"""`python -m lean` is the command `lean`."""

from lean.cli.main import main

if __name__ == "__main__":
    main()
