//! Tests stores on simulated devices and in files: commits, reads, damage, refusals, and recovery after a crash.

mod copies;
mod crash;
mod creation;
mod damage;
mod grains;
mod log;
mod model;
mod previous;
mod reading;
mod refusals;
mod staging;
