"""Analyses of a group before it is scheduled: domains, accesses, dependences, skeletons, addresses, prologues."""
