"""The batch scheduler: which calls run in the next forward, and the measurements that decide it."""
