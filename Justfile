# The tasks of the first design (build, local, test, worker, serve …), each one line of today's commands.
# `just` lists them. A token is given as an argument here and reaches the node through its environment.

mesh := justfile_directory() / ".venv/bin/mesh-llm"

_default:
    @just --list

# set up .venv and compile the engine's code for this machine
build:
    make setup && {{ mesh }} engine build

# download a model of the catalog
download-model name="glm":
    {{ mesh }} download {{ name }}

# a mesh on this machine and one question to it
local: build
    {{ mesh }} demo

# ask the node on this machine something
test:
    curl -fsS http://localhost:9337/v1/chat/completions -H "Content-Type: application/json" -d '{"messages":[{"role":"user","content":"Hello!"}],"max_tokens":50}'

# start a mesh on a network of your own, over plain TCP, whose engine runs elsewhere; prints a token
worker *options:
    {{ mesh }} --plain-lan --no-relay --hosting never {{ options }}

# join such a mesh and run its engine
serve token *options:
    @MESH_LLM_JOIN={{ token }} {{ mesh }} --plain-lan --no-relay --hosting prefer {{ options }}

# start a mesh whose engine runs elsewhere; prints a token
mesh-worker *options:
    {{ mesh }} --hosting never {{ options }}

# join a mesh and run its engine
mesh-serve token *options:
    @MESH_LLM_JOIN={{ token }} {{ mesh }} --hosting prefer {{ options }}

# one file that installs on another machine without a registry
bundle *options:
    {{ mesh }} bundle {{ options }}

# drain and stop the node on this machine
stop:
    {{ mesh }} stop
