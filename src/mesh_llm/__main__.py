"""`python -m mesh_llm` is `mesh-llm`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs a clone as it lies has no pip that says so
    sys.exit(
        "Error: Python 3.11 or newer is needed; this is %d.%d\n" % sys.version_info[:2]  # noqa: UP031
        + "Hint: run it with a newer one, such as python3.12 -m mesh_llm"
    )

from mesh_llm.cli.entry import main

if __name__ == "__main__":
    main()
