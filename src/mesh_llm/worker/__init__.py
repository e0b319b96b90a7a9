"""What this node lends to plans that other nodes host.

lending  leases, the worker child, and the links to it
"""
