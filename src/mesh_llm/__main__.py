"""`python -m mesh_llm` is `mesh-llm`."""

from mesh_llm.cli.entry import main

if __name__ == "__main__":
    main()
