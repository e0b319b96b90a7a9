"""Who is here: members, their standing, and what they say about themselves. Pure.

`View` takes what happened (connections, messages, ticks) with the time, and returns effects;
a driver performs them. Between views travel the messages of `messages`.

Two kinds of knowledge are kept apart. The *ledger* holds what is said about a node: its facts, and
whether it lives, ordered by incarnation, so that all ledgers become equal whatever order the news
come in. *Evidence* is what a view has itself: connections that answer, and neighbours that hear a
node (`via`). Only a view whose evidence has run out calls a node dead; only the node itself can
take that back, with a higher incarnation.
"""
