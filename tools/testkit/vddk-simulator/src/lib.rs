//! A simulated libvixDiskLib: a shared library with the functions of VMware's Virtual Disk
//! Development Kit that a program needs for reading, writing and mapping disks. The disks are local
//! files. It has the costs of a real host (time for each query, latency, a bandwidth limit for each
//! handle), returns errors on request, and reports misuse.
//!
//! Copy the shared object to `DIR/lib64/libvixDiskLib.so.8`, settings to `DIR/simulator.conf`, and
//! use `DIR` as the library's directory. `docs/vddk-simulator.md` describes settings and figures.
//!
//! - `ffi`: the exported functions. `types`: structures and numbers of the interface.
//! - `settings`: what the user sets. `disk`: contents. `state`: connections, handles and rules.
//! - `job`: asynchronous requests. `transfer`: their threads. `query`: allocated blocks.
//! - `counters`: calls and misuse, as JSON.

mod counters;
mod disk;
mod ffi;
mod job;
mod query;
mod settings;
mod state;
mod transfer;
mod types;
