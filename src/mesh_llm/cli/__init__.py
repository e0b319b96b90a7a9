"""The command line: the only package that prints. One file for each group of verbs.

entry          where `mesh-llm` begins; its help lies ready
main           all verbs, and how each of them ends
words          words that people type from habit
serve          `mesh-llm`, `mesh-llm serve`, `run`: run a node
chat           `mesh-llm chat`
lending        `mesh-llm pause`, `resume`
options        the options of a node
config_file    options from `config.toml` in the home
demo           `mesh-llm demo`: a mesh on this machine
status         `mesh-llm status`
plan           `mesh-llm plan`
plan_machines  machines that are not there, for `mesh-llm plan --with`
load           `mesh-llm load`, `unload`, `use`: which models are served
models         `mesh-llm models`: what is on this disk
inventory      every model on this disk, and whether it fits
catalog_fit    `mesh-llm models --fits`: the catalog by what can be run here
catalog        `mesh-llm catalog`: its lists, and one that somebody else keeps
download       `mesh-llm download`: the catalog, and models from it
progress_bars  progress of downloads, as bars or lines
invite         `mesh-llm invite`, `promote`
pair           `mesh-llm join`, `invite --pair`: a short code instead of a token
keys           `mesh-llm keys`
share          `mesh-llm share`
control        `mesh-llm stop`, `leave`; the connection to the running node
service        `mesh-llm service`
service_files  the files of a service
logs           `mesh-llm logs`
doctor         `mesh-llm doctor`
engine         `mesh-llm engine info`, `engine build`
completion     `mesh-llm completion`
man            `mesh-llm man`
bundle         `mesh-llm bundle`
agent          `mesh-llm agent`
relay          `mesh-llm relay`
bench          `mesh-llm bench`
bench_mesh     `mesh-llm bench mesh`
bench_grid     `mesh-llm bench grid`
bench_transport  `mesh-llm bench transport`
bench_speculation  `mesh-llm bench speculation`
bench_compare  `mesh-llm bench compare`
lab            `mesh-llm lab`
lab_delay      `mesh-llm lab delay`
lab_chaos      `mesh-llm lab chaos`
measuring      how measurements run and end
results        how measurements show what they found: tables, JSON, files
lab_simulate   `mesh-llm lab simulate`: meshes of thousands of nodes
groups         verbs with verbs of their own
secret         keys and tokens from files, standard input and the environment
signals        which signals end a command
output         text, tables and JSON on stdout, messages on stderr
tables         tables of nodes, stages and plans
live           the view of a running node in a terminal, once a second
live_view      that view as lines
terminal       draws below lines that stay
node_events    what a running node reports, for other commands that watch it
imports        keeps imports few, so that commands start fast
browser        opens the console's page
"""
