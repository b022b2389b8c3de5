"""The CPU side work that rq runs: retention sweeps, and moving jobs on while no GPU worker is alive.

A chore is a plain function that reads its settings and runs the async code it stands for. Each is short, bounded and
harmless to repeat, since any of them may be killed at any point and run again.
"""
