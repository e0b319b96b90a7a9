"""Decisions: what fits, who does what, what comes next.

PURE: time, memory and the state of the mesh are passed in and answers come
out. Nothing here imports asyncio, socket, time, os or subprocess.
"""
