//! Microbenchmarks of host memory.
fn main() {}
