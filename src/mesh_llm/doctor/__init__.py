"""What is wrong with this machine and its mesh, why it matters, and the command that mends it.

A check is a function that gets a `CheckContext` and returns findings. To add one, write it in the module of
its subject and name it in `examine.CHECKS`: time limit, text, JSON and report follow from that.

finding    what a check has found, and how bad it is
context    where checks look: the home, the node's options, what the running node knows
examine    the list of checks; runs them side by side, each within its time
machine    Python, packages, engine, native libraries, GPUs, memory, limits, clock
storage    home, keys, disks, model files and their hashes
network    ports, addresses, firewall
mesh       the running node, its peers and relay, versions, clocks
thread     threads that may hang
redaction  takes secrets, names of people and public addresses out of a text
report     the file to attach to a question
"""
