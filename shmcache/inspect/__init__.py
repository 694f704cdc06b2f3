"""`shmcache-inspect`: what is in a segment, who holds it, why a lookup missed, and what is safe to do.

Reading verbs map the control file read-only: they take no lock and no slot, write nothing, and work on
a segment that is live, stuck, poisoned, a copy, or whose processes are all dead. Nothing here imports
torch, and each verb imports only what it needs. Start at `cli`; `_reader` is how a segment is read.
"""
