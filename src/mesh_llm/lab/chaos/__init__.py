"""A mesh under load, while things are done to it, and what has to hold all the same.

schedule    which faults happen when: drawn from a seed. Pure
records     the log of a run: one JSON document per line
member      program: a node that can be cut off, slowed down, and told another time
gate        a link that can be held up
processes   the processes of a run: whose they are, what they use, what can be done to them
mesh        the nodes of a run: started, stopped, killed, replaced
faults      what each kind of fault does, and how it is undone
questions   what clients ask
load        clients: they ask, listen, and leave
watch       looks at nodes and processes while a run lasts
oracles     what has to hold, judged by the log alone. Pure
pauses      where the time of a pause went. Pure
shrink      fewer faults that cause the same failure. Pure
run         one run, from the first node to the last oracle
report      what a run found, as tables and curves. Pure
"""
