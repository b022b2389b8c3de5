"""The command `fusequeue`: it starts processes and speaks HTTP."""
