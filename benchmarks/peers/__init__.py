"""DeepSpeed beside `memascend bench io` and `update`: `python -m benchmarks.peers.bench_io` and `.bench_update`."""
