"""Who is here: members, their standing, and what they say about themselves. Pure.

`View` takes what happened (connections, messages, ticks) with the time, and returns effects;
a driver performs them.

Two kinds of knowledge are kept apart. The *record table* holds what is said about a node: its
facts, and whether it lives, ordered by incarnation, so that all tables become equal whatever order
news arrives in. *Evidence* is what a view has itself: connections that answer, and neighbours that
hear a node (`via`). Only a view whose evidence has run out calls a node dead; only the node itself
can take that back, with a higher incarnation.

    view                a node's view of the mesh: events in, effects out
    view_state          what the parts of a view share
    effects             what a view wants done
    outbox              the effects of one step, and news for the neighbours
    member              a member, as a view shows it
    record              what is said about one node
    record_table        what is said about all nodes, and digests of it
    own_record          this node's own record
    gossip              how record tables become equal
    failure_detector    who lives: evidence, suspicion, death
    links               connections: pings, whom this node hears, which are wanted
    visitors            lite clients that are connected here
    heartbeat           one connection: last heard, delay, whom the other side hears
    dial_backoff        when to dial which address
    ring                whom to stay connected to in a large mesh
    messages            what members say to each other, as JSON
    fact_documents      facts of a node as JSON
    plan_documents      plans as JSON
    settings_documents  the mesh's settings as JSON
    document_shapes     records as JSON, by one declaration for writing and reading
    checked_fields      reads JSON from strangers: every type, length and range is checked
    seeded_random       random numbers that can be repeated
"""
