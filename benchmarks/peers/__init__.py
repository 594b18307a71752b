"""Storage and the update beside fio and DeepSpeed: `python -m benchmarks.peers.bench_io` and `.bench_update`."""
