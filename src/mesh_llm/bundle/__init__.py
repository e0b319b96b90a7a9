"""A bundle: one file from which mesh-llm installs on other machines, without a registry or a compiler.

build          makes one: wheels, sums, install.sh, and a model if wanted
own_wheel      mesh-llm's own wheel: compiled in a clone, packed again from an installation
locked         which packages a node needs, at which versions, from the lock file

install.sh is what runs on the other machine; it reads bundle.txt and SHA256SUMS beside it.
"""
