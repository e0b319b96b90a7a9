"""What this node lends to plans that other nodes host.

lending         leases, the worker children, and the links to them
lease_progress  how far the layers of a lease are
"""
