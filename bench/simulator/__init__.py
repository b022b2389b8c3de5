"""Workers that batch jobs in simulated time. The order of the queue is that of the product.

`clock` runs events, `kinds` has the costs of jobs and their arrivals, `queue` the queued jobs as facts for
`shared.queue.order`, `simulation` the workers, `policies` what they claim, and `learned` what the queue learns from
jobs. `python -m bench.simulate`, `bench.swaps`, `bench.merging`, `bench.queue.deadlines` and `bench.fleet` are its
commands.
"""
