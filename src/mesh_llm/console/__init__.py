"""A running node, to look at and to manage: the web page, and what the command line asks.

server      the page's port: loopback, its own origin only
guard       who may call it: the page, with a token of its own
page        the page's files, as they lie in static/
routes      /api/…: status, invites, stop; also on the unix socket in the node's home,
            where the file's permissions are the key
feed        /api/events: one look at the node, for all who watch
chat        /v1/… for the page: passed on to the node's own API
"""
