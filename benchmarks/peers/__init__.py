"""Compares memascend's storage and update with fio and DeepSpeed.

Run `python -m benchmarks.peers.bench_io` or `python -m benchmarks.peers.bench_update`.
"""
