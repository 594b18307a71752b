"""Measures storage and the update beside fio and DeepSpeed: `python -m benchmarks.peers.bench_io`, `.bench_update`."""
