"""The order of the queue: which jobs a worker claims next. Pure functions of bounded rows that scripts read.

`facts` are those rows, `signatures` chooses the signature of a new batch, `joining` whether jobs may join a running
one, `jobs` the jobs of a signature. The `Decision` goes to the script `take`, which claims what is still queued as it
was read. `position` tells clients where a queued job stands in this order, and why it waits; `expected_ends` when it is
expected to end, also while it waits for others.
"""
