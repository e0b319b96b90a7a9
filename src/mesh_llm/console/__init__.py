"""Management of a running node over HTTP: what it knows, and what it can be told to do.

Served on the unix socket in the node's home, where the file's permissions are
the key; the web page will be the second user of the same routes.
"""
