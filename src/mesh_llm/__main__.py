"""`python -m mesh_llm` is `mesh-llm`."""

from mesh_llm.cli.main import main

if __name__ == "__main__":
    main()
