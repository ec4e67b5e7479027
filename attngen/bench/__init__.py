"""Measuring attention kernels beside their peers: what `attngen bench` runs.

`cases` says what is measured, `contenders` by whom, `check` that it is right, `timing` how long it takes, `machine` on
what, `record` keeps it, `tables` and `page` show it."""
