"""CPU-only background tasks, run by rq: retention, maintenance, webhooks, batches.

A chore is a plain function that loads the settings and runs async code. It is short, bounded and idempotent, because
it can be killed at any point and run again.
"""
