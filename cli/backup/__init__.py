"""`fusequeue backup` and `fusequeue restore`: one file with the Redis data and the storage of a `fusequeue up`."""
